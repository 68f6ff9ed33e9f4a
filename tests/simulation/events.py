"""The events of a trace, which happen between the steps of an engine or while one is in flight."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.features.transfer.rows import receive_blocks
from jaxllm.errors import EngineError
from jaxllm.scheduler.state import Plan
from tests.simulation.adapters import request_of
from tests.simulation.client import Client
from tests.simulation.device import Violation
from tests.simulation.requests import burst, leave_early, race, submit

if TYPE_CHECKING:
    from jaxllm.engine.engine_client import PauseMode
    from tests.simulation.world import World


def happen(world: World, kind: str, arguments: Sequence[Any]) -> None:
    """Carry out an event; count it in `fired` if it has an effect now."""
    match kind:
        case "request":
            submit(world, arguments[0])
        case "disconnect" | "abort":
            stop_one(world, kind, *arguments)
        case "duplicate_id":
            if arguments[0] % 4 == 0:
                world.fired["duplicate_at_once"] += race(world, arguments[1] | {"text": "abcabcab"})
            elif world.live:
                name = list(world.live)[arguments[0] % len(world.live)]
                world.fired[kind] += submit(world, arguments[1] | {"name": name})
        case "leave_early":
            world.fired[kind] += leave_early(world, arguments[0] | {"text": "abcabcab"})
        case "tokenizer_error":
            failures = world.tokenizer.num_failures
            submit(world, arguments[0])
            world.loop.run()
            world.fired[kind] += world.tokenizer.num_failures > failures
        case "burst":
            burst(world, *arguments)
        case "clock_forward" | "clock_back":
            world.fired[kind] += 1
            for client in world.clients:  # a deadline that has passed by now still counts
                client.latest = max(client.latest, world.now)
            world.now += arguments[0] if kind == "clock_forward" else -arguments[0]
        case "clock_freeze":
            world.fired[kind] += 1
            world.frozen_until = world.turn + arguments[0]
        case "allocation_refused":
            world.takes_until_refusal = arguments[0]
        case "result_duplicated":
            if world.last_commit is not None:
                commit_again(world, *world.last_commit, kind)
        case "result_of_gone":
            flying = {plan.number for plan, _ in world.engine._in_flight}
            gone = [plan for plan in world.plans if plan.number not in flying]
            if gone:
                commit_again(world, gone[0], np.full(len(gone[0].slots), 5, np.int32), None, None, None, kind)
        case "resume_reading":
            for client in world.clients:
                if client.pause is not None and not client.pause.done() and (client.reads or 0) > 0:
                    world.fired["slow_reader"] += 1
                    client.pause.set_result(None)
        case "pause":
            pause(world, *arguments)
        case "receive":
            receive(world, *arguments)
        case "reset_cache":
            world.fired[kind] += 1
            call(world, reset_cache(world))
        case "drain":
            if world.draining is None:
                world.fired[kind] += 1
                if world.turn % 3 == 0:
                    pause(world, "keep", 1)  # a drain finishes the requests that a pause kept
                world.is_draining = True
                world.resume_at = None
                world.is_held = False
                world.drain_until = world.now + arguments[0]
                world.draining = world.loop.create_task(drain(world, arguments[0]))
        case "reload_adapter":
            if world.setting["max_adapters"]:
                reload_adapter(world, *arguments)
        case "restart":
            world.fired[kind] += 1
            world.end()
            world.begin()
        case "not_finite":
            world.armed[kind] = arguments[0]
            world.armed["score_not_finite"] = True
        case "dies":
            world.armed[kind] = True
        case _:
            world.armed[kind] = arguments[0] if arguments else True


def receive(world: World, number: int, seed: int) -> None:
    """Give the host's tier some blocks of a request's prompt from elsewhere, in any order; others are lost.

    The request may run or have ended by now. An index may be beyond its blocks.
    """
    chance, reference = random.Random(seed), world.reference
    entries = reference.waiting if reference.waiting and chance.random() < 0.9 else [*reference.by_id.values()]
    if not entries or not world.setting["host_blocks"][0]:
        return
    entry, size = entries[number % len(entries)], world.setting["block_size"]
    places = [(group, at) for group in range(reference.limits.num_groups) for at in range(entry.num_tokens // size + 1)]
    chosen = [place for place in places if chance.random() < chance.choice((0.5, 0.9, 1.0))]
    chance.shuffle(chosen)
    chain = entry.truth.chain
    blocks = [(group, at, (chain[at * size : (at + 1) * size].copy(),)) for group, at in chosen]
    receive_blocks(world.engine.scheduler, world.runner, entry.id if chance.random() < 0.95 else -1, blocks)
    world.fired["receive"] += entry.slot == -1
    world.fired["receive_late"] += entry.slot >= 0


def reload_adapter(world: World, number: int, is_changed: bool, is_forgotten: bool) -> None:
    """Change the files of an adapter, remove it from the engine, or both."""
    index = 1 + number % world.setting["num_adapters"]
    world.fired["reload_adapter"] += 1
    if is_changed:
        world.folders.change(index)
    if is_forgotten:
        call(world, forget_adapter(world, index))


async def forget_adapter(world: World, index: int) -> None:
    request = request_of(index)
    was_known = request.lora_int_id in await world.llm.list_loras()
    if await world.llm.remove_lora(request.lora_int_id) != was_known:
        raise Violation("an adapter was forgotten that was not known, or the reverse")
    if request.lora_int_id in await world.llm.list_loras():
        raise Violation("an adapter that was forgotten is still known")
    world.folders.forget(index)


def stop_one(world: World, kind: str, number: int, _is_mid: bool, is_twice: bool, wanted: str | None) -> None:
    """Disconnect or abort a request, in the phase `wanted` if one is, perhaps twice; without requests, abort no id."""
    if not world.clients:
        call(world, world.llm.abort("nobody"))
        world.fired["abort_after_end"] += 1
        return
    fitting = [client for client in world.clients if phase_of(client) == wanted] or world.clients
    client = fitting[number % len(fitting)]
    phase = phase_of(client)
    world.fired[f"{kind}_{phase}"] += 1
    if is_twice:
        world.fired[f"{kind}_twice"] += 1
    for _ in range(1 + is_twice):
        if kind == "disconnect":
            assert client.task is not None
            client.task.cancel()
            world.loop.run()
            if not _is_mid and number % 4 == 0 and client.name not in world.live:
                world.fired["id_again"] += submit(world, client.request)
        else:
            client.may_be_aborted = True
            client.aborted_in = world.turn if client.aborted_in is None else client.aborted_in
            call(world, world.llm.abort([client.name]))


def phase_of(client: Client) -> str:
    samples = [entry for entry in client.entries if entry.slot > -2]
    if not client.entries:
        return "unseen"
    if not samples:
        return "ended"
    if all(entry.slot < 0 for entry in samples):
        return "preempted" if any(entry.admission for entry in samples) else "queued"
    return "prefill" if any(entry.num_computed < entry.num_prefill for entry in samples) else "decode"


def commit_again(
    world: World,
    plan: Plan,
    tokens: np.ndarray,
    is_finite: np.ndarray | None,
    counts: np.ndarray | None,
    sampled: np.ndarray | None,
    kind: str,
) -> None:
    """Commit a result again, or one whose requests have ended; check that nothing changes."""
    world.fired[kind] += 1
    kept = world.last_commit
    events = world.engine.scheduler.commit(plan, tokens, is_finite, counts, sampled)
    world.last_commit = kept
    if len(events.ids) or events.finished or events.failed:
        raise Violation("a late result was taken for a new one")


def pause(world: World, mode: PauseMode, turns: int) -> None:
    if world.is_paused or world.is_draining:
        return
    world.fired[f"pause_{mode}"] += 1
    world.is_paused = True
    world.resume_at = world.turn + turns
    if mode == "abort":
        for client in world.clients:
            client.may_be_aborted = True
            client.aborted_in = world.turn if client.aborted_in is None else client.aborted_in
    call(world, paused(world, mode))


async def paused(world: World, mode: PauseMode) -> None:
    """Pause; unless `mode` is "keep", check after the call that no requests are left and the cache was reset."""
    resets, resumed = world.reference.num_resets, world.num_resumed
    world.pausing += 1
    try:
        await world.llm.pause(mode)
    finally:
        world.pausing -= 1
    if world.num_resumed > resumed or world.is_draining:
        return
    world.is_held = True
    if mode != "keep":
        if world.reference.by_id:
            raise Violation(f"a pause that was to {mode} leaves requests behind")
        if world.reference.num_resets == resets:
            raise Violation("a pause leaves the cache as it was")


async def drain(world: World, timeout: float) -> bool:
    """Drain, and check that a True result means that all requests have ended."""
    is_through = await world.llm.drain(timeout)
    if is_through and (world.clients or world.has_died):
        raise Violation("a drain says that all were through, and some wait, or the engine is dead")
    return is_through


def resume(world: World) -> None:
    world.resume_at = None
    world.is_paused = world.is_held = False
    world.num_resumed += 1
    call(world, world.llm.resume())


async def reset_cache(world: World) -> None:
    before = world.reference.num_resets
    if await world.llm.reset_prefix_cache() and world.reference.num_resets == before:
        raise Violation("a cache was told to be reset, and was not")


def call(world: World, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a call on the event loop; an EngineError is allowed while the engine is stopped, paused or hung."""

    async def guarded() -> None:
        try:
            await coroutine
        except EngineError as error:
            if not (world.is_dead or world.is_draining or world.is_hung or world.is_paused):
                world.loop.failures.append(error)
        except Exception as error:
            world.loop.failures.append(error)

    world.tasks = [task for task in world.tasks if not task.done()]
    world.tasks.append(world.loop.create_task(guarded()))
    world.loop.run()
