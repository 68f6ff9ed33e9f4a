"""Submits the requests of a trace, and predicts which ones the engine refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.streaming_engine import most_queued, most_queued_tokens
from jaxllm.errors import (
    ContextLengthError,
    DrainingError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestIdInUseError,
    UnavailableError,
    UserError,
)
from jaxllm.sampling_params import SamplingParams
from tests.simulation.adapters import BROKEN_FOLDER, request_of
from tests.simulation.beams import blocks_of, is_too_wide, params_of_beams
from tests.simulation.client import Client
from tests.simulation.device import Violation
from tests.simulation.grammars import is_refused
from tests.simulation.media import whole_image
from tests.simulation.oracle import BrokenTextError

if TYPE_CHECKING:
    from tests.simulation.world import World


def submit(world: World, request: dict[str, Any]) -> bool:
    """Submit a request; check that it is accepted, or refused with the expected error. Always returns True."""
    ids = ids_of(world, request)
    client = Client(world, request, ids, params_of(world, request["params"]))
    due = refusal(world, client)
    client.task = world.loop.create_task(client.run())
    if due is None:
        world.live[client.name] = client
        world.clients.append(client)
    world.submitting = client
    world.loop.run()
    found = None if client.is_submitted or not client.is_over else type(client.error)
    if found is not due:
        raise Violation(f"{client.name} was refused with {found} ({client.error}), where {due} is due")
    if due is not None:
        world.fired[f"refused_{due.__name__}"] += 1
        return True
    for name, is_edge in edges(world, client):
        world.fired[name] += is_edge
    return True


def race(world: World, request: dict[str, Any]) -> bool:
    """Submit two requests of equal id while threads prepare their prompts; check that the second is refused.

    Returns False, without a test, if the first would be refused or the queue has too little room.
    """
    ids, params = ids_of(world, request), params_of(world, request["params"])
    first, second = (Client(world, request, ids, params) for _ in range(2))
    if refusal(world, first) is not None or queue_is_full(world, params.n + 1, params.n * len(ids)):
        return False
    held = world.loop.held = []
    for client in (first, second):
        client.task = world.loop.create_task(client.run())
    world.loop.run()
    world.loop.held = None
    reads = first.folder is not None and world.llm.engine.adapters.find(request_of(first.folder)) is None
    # One adapter is read at a time.
    if len(held) != (1 if reads else 2) or world.llm._num_preparing != 2:
        raise Violation("prompts that are being made are not counted into the queue")
    world.live[first.name] = first
    world.clients.append(first)
    world.submitting = first
    for run in held:
        run()
    world.loop.run()
    if not first.is_submitted or not isinstance(second.error, RequestIdInUseError) or world.llm._num_preparing:
        raise Violation("two requests have one id, or none was taken")
    return True


def leave_early(world: World, request: dict[str, Any]) -> bool:
    """Submit a request whose client disconnects while a thread prepares the prompt; check that it is never queued.

    Returns False, without a test, if the request would be refused.
    """
    client = Client(world, request, ids_of(world, request), params_of(world, request["params"]))
    if refusal(world, client) is not None:
        return False
    held = world.loop.held = []
    client.task = world.loop.create_task(client.run())
    world.loop.run()
    world.loop.held = None
    client.task.cancel()
    world.loop.run()
    for run in held:
        run()
    world.loop.run()
    if len(held) != 1 or not client.was_dropped or client.is_submitted:
        raise Violation(f"{client.name} went away before its prompt was made, and is there")
    return True


def edges(world: World, client: Client) -> Iterator[tuple[str, bool]]:
    size, most, length = world.setting["block_size"], world.max_model_len, len(client.ids)
    yield "length_1", length == 1
    yield "length_block-1", length == size - 1
    yield "length_block", length == size
    yield "length_block+1", length == size + 1
    yield "length_max-1", length == most - 1
    yield "forks", client.params.n > 1
    yield "beams", client.beams is not None
    yield "adapted", bool(client.folder)
    yield "constrained", client.params.structured_outputs is not None
    yield "limit_of_pool", -(-(client.limit - 1) // size) == world.setting["num_blocks"]


def ids_of(world: World, request: dict[str, Any]) -> list[int]:
    if "text" in request and "\0" not in request["text"]:
        return world.tokenizer.encode(request["text"], add_special_tokens="source" not in request)
    return request["ids"]


def beams_of(given: dict[str, Any]) -> BeamSearchParams | None:
    """Return the parameters of a beam search, or None without one."""
    return BeamSearchParams(**given["beams"]) if "beams" in given else None


def params_of(world: World, given: dict[str, Any]) -> SamplingParams:
    """Return sampling parameters, the same object for equal `given`, except for distinct seeds if it has "seeded"."""
    name = repr(given)
    asked = beams_of(given)
    if asked is not None:
        return params_of_beams(asked)
    if name not in world.params:
        world.params[name] = SamplingParams(**{key: value for key, value in given.items() if key != "seeded"})
    params = world.params[name]
    if "seeded" in given:
        world.num_seeds += 1
        params = copy.copy(params)
        seed = (-1) ** world.num_seeds * (world.num_seeds << 20)
        object.__setattr__(params, "seed", seed)  # every seed is valid: no further check
    return params


def refusal(world: World, client: Client) -> type[Exception] | None:
    """Return the error with which a request must be refused, or None."""
    setting, params = world.setting, client.params
    num_ids = len(client.ids)
    if world.is_draining and not world.is_dead:
        return DrainingError
    if world.is_dead:
        return EngineDeadError
    if world.is_paused or world.is_hung:
        return UnavailableError
    if client.name in world.live:
        return RequestIdInUseError
    if queue_is_full(world, 1, 0):
        return OverloadedError
    if client.folder == BROKEN_FOLDER:
        return UserError
    if client.source and "\0" in client.request.get("text", ""):  # its prompts are read first
        return BrokenTextError
    if client.beams is not None and is_too_wide(client.beams, setting["num_slots"]):
        return UserError
    if isinstance(client.prompt, str) and "\0" in client.prompt:
        return BrokenTextError
    if isinstance(client.prompt, dict) and "\0" in str(
        client.prompt.get("prompt") or client.prompt.get("decoder_prompt")
    ):
        return BrokenTextError
    if num_ids == 0:
        return UserError
    if num_ids >= world.max_model_len or num_ids + params.min_tokens > world.max_model_len:
        return ContextLengthError
    if client.source is None and is_refused(params.structured_outputs):
        return UserError
    needed = -(-(client.limit - 1) // setting["block_size"])
    if client.beams is not None and params.n > 1:
        needed = blocks_of(num_ids, client.limit, params.n, setting["block_size"], not setting["window"])
        one = -(-(client.limit - 1) // setting["block_size"])
        if setting["window"] and params.n * min(one, least_windowed(setting)) > setting["num_window_blocks"]:
            return ContextLengthError
    needed += -(-client.source[1] // setting["block_size"]) if client.source else 0
    if needed > setting["num_blocks"]:
        return ContextLengthError
    if client.source and is_refused(params.structured_outputs):  # its prompts are checked first
        return UserError
    if params.n > setting["num_slots"] + most_queued(setting["most_queued"], setting["num_slots"]):
        return UserError
    if queue_is_full(world, params.n, params.n * num_ids):
        return OverloadedError
    return None


def least_windowed(setting: Mapping[str, Any]) -> int:
    """Return the number of blocks of windowed layers with which one sequence can run."""
    size = setting["block_size"]
    return -(-(setting["window"] - 1) // size) + 1 + -(-max(2, whole_image(setting)) // size)


def queue_is_full(world: World, num_samples: int, num_tokens: int) -> bool:
    setting = world.setting
    running, waiting, waiting_tokens, _ = world.reference.loads()
    waiting += sum(client.params.n for client in world.submitted)
    waiting_tokens += sum(client.params.n * len(client.ids) for client in world.submitted)
    slots = setting["num_slots"]
    most = most_queued(setting["most_queued"], slots)
    most_tokens = most_queued_tokens(setting["most_queued_tokens"], world.max_model_len)
    if waiting + num_samples > most + slots - running:
        return True
    return bool(waiting_tokens) and waiting_tokens + num_tokens > most_tokens


def burst(world: World, size: int, request: dict[str, Any]) -> None:
    """Submit `size` requests at once; check that the queue takes those it has room for and refuses the others."""
    world.fired["burst"] += 1
    world.fired["burst_10000"] += size >= 10_000
    probe = Client(world, {"name": "burst"}, [5], params_of(world, {"max_tokens": 1}))
    number = 0
    while number < size and refusal(world, probe) is None:
        submit(world, request | {"name": f"{request['name']}.{number}"})
        number += 1
    for _ in range(number, size):
        try:
            world.llm.generate([5], probe.params, probe.name).__anext__().send(None)
        except EngineError:
            continue
        except BaseException as error:
            raise Violation("a burst was not refused although the queue is full") from error
