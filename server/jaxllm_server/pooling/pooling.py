"""Embed, classify and score: check a `PoolCall` as a whole, then compute it in parts.

Keeps prompts for three steps in the engine, in at most half of its queue. Clients submit prompts round-robin, so that
long calls delay others by a few steps only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxllm.engine.async_llm import LONG_TEXT
from jaxllm.engine.engine_client import EngineClient
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.streaming_engine import most_queued, most_queued_tokens
from jaxllm.errors import (
    FeatureDisabledError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
    UserError,
    late,
    too_long,
)
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.text.tokenizer import TOKENS_AT_A_CUT
from jaxllm_server.access.client_quota import FairAdmission
from jaxllm_server.observability.tracing import REQUEST_SPAN, current_span
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.pooling.pool_site import PoolSite
from jaxllm_server.shared.truncation import cut_ids

_log = logging.getLogger("jaxllm.server")
_STEPS = 3  # of prompts: two in flight and the next
FULL_SECONDS = 0.25  # retry interval while the queue is full
_DOES = {"embed": "embeds texts", "classify": "classifies texts", "score": "scores pairs of texts"}


class _Item(NamedTuple):
    """A text, token ids, or two texts."""

    index: int  # of its first result …
    parameter: str  # … and the field that errors name
    first: str | Sequence[int]
    second: str | None = None


class _Prompt(NamedTuple):
    """A checked prompt. Pairs have no ids yet: a query's would be stored once per document."""

    num_tokens: int
    ids: Sequence[int] | None
    texts: tuple[str, str] | None = None


_Outputs: TypeAlias = Callable[[Sequence[_Item]], AsyncGenerator[tuple[int, PoolingRequestOutput]]]


def check_kind(model: ModelInfo, name: str, pools: bool) -> None:
    if model.pooler is not None and not pools:
        raise FeatureDisabledError(f"The model {name} {_does(model)}; it generates no text.", "model")
    if model.pooler is None and pools:
        raise FeatureDisabledError(f"The model {name} generates text; it does not embed, classify or score.", "model")


async def pool(serving: PoolSite, places: FairAdmission, call: PoolCall) -> AsyncGenerator[PoolResult]:
    """Yield results as they are computed; closing the iterator aborts the rest.

    All inputs are checked first. `places` limits the pooling prompts in the engine's queue.
    """
    name, model = serving.check_model(call.model), serving.engine.model
    serving.check_text("request_id", call.request_id)
    serving.check_text("cache_salt", call.cache_salt)
    await serving.engine.check_health()
    task = _task_of(call, model, name)
    _check_inputs(call, serving.options.max_pooling_inputs)
    compares = task == "score" and task not in model.tasks
    params = PoolingParams(
        task="embed" if compares else task,
        dimensions=call.dimensions,
        normalize=True if compares else call.normalize,
        use_activation=call.use_activation,
        truncate_prompt_tokens=call.truncate_prompt_tokens,
    )
    outputs = functools.partial(_outputs, serving, places, call, params)
    results = _cosines(call, outputs) if compares else _each(call, outputs)
    num_tokens = 0
    async with aclosing(results):
        async for result in results:
            num_tokens += result.prompt_tokens
            yield result
    facts = {"gen_ai.response.model": name, "gen_ai.request.id": call.request_id}
    current_span().set({**facts, "gen_ai.usage.prompt_tokens": num_tokens}, name=REQUEST_SPAN)


async def _each(call: PoolCall, outputs_of: _Outputs) -> AsyncGenerator[PoolResult]:
    seconds = call.pairs or [None] * len(call.inputs)
    both = zip(call.inputs, seconds, strict=True)
    items = [_Item(index, "inputs", first, second) for index, (first, second) in enumerate(both)]
    async with aclosing(outputs_of(items)) as outputs:
        async for at, output in outputs:
            yield PoolResult(at, output.outputs.data, len(output.prompt_token_ids))


async def _cosines(call: PoolCall, outputs_of: _Outputs) -> AsyncGenerator[PoolResult]:
    """Yield each pair's cosine similarity; embed each distinct text once."""
    pairs: list[Any] = list(zip(call.inputs, call.pairs or (), strict=True))
    items: dict[str, _Item] = {}
    for index, pair in enumerate(pairs):
        for parameter, text in zip(("inputs", "pairs"), pair, strict=True):
            items.setdefault(text, _Item(index, parameter, text))
    waiting: dict[str, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        for text in set(pair):
            waiting[text].append(index)
    texts, vectors = list(items), dict[str, tuple[np.ndarray, int]]()
    async with aclosing(outputs_of(list(items.values()))) as outputs:
        async for at, output in outputs:
            vectors[texts[at]] = output.outputs.data.astype(np.float64), len(output.prompt_token_ids)
            for index in waiting[texts[at]]:
                if all(text in vectors for text in pairs[index]):
                    (one, num_one), (other, num_other) = (vectors[text] for text in pairs[index])
                    yield PoolResult(index, np.array([one @ other], np.float32), num_one + num_other)


async def _outputs(
    serving: PoolSite, places: FairAdmission, call: PoolCall, params: PoolingParams, items: Sequence[_Item]
) -> AsyncGenerator[tuple[int, PoolingRequestOutput]]:
    arrival, engine = time.monotonic(), serving.engine
    model = engine.model
    timeout = serving.options.request_timeout or None
    request_id = call.request_id or uuid.uuid4().hex
    most = _most_tokens(call, model.max_model_len)

    async def run(number: int) -> PoolingRequestOutput:
        item, own_id = items[number], request_id if len(items) == 1 else f"{request_id}-{number}"
        _, ids, texts = prompts[number]
        prompt: dict[str, Any] = {"prompt_token_ids": ids, **serving.salt_of(call.client, call.cache_salt)}
        if texts is not None:
            own = *texts, most
            is_long = sum(map(len, texts)) > LONG_TEXT
            prompt |= (await serving.off_loop(call.client, model.pair, *own)) if is_long else model.pair(*own)
        while True:
            try:
                outputs = engine.encode(
                    prompt,
                    params,
                    own_id,
                    owner=serving.owner_of(call.client),
                    client=call.client,
                    priority=priority,
                    timeout=timeout,
                    arrival=arrival,
                    name=f"{own_id} ({call.client_id})" if call.client_id else None,
                )
                place = places.place(call.client, prompts[number].num_tokens, most_prompts, most_tokens)
                left = None if timeout is None else max(0.0, arrival + timeout - time.monotonic())
                async with AsyncExitStack() as held:
                    try:
                        async with asyncio.timeout(left):
                            await held.enter_async_context(place)
                    except TimeoutError:
                        assert timeout is not None
                        raise late(timeout) from None
                    async with aclosing(outputs):
                        return _checked(await anext(outputs))
            except OverloadedError:
                if timeout is not None and time.monotonic() > arrival + timeout:
                    raise late(timeout) from None
                await asyncio.sleep(FULL_SECONDS)
            except (UserError, RequestFailedError) as error:
                raise _naming(error, item, len(items)) from None

    said: asyncio.Queue[tuple[int, PoolingRequestOutput] | Exception] = asyncio.Queue()

    async def work(number: int) -> None:
        try:
            said.put_nowait((number, await run(number)))
        except Exception as error:
            said.put_nowait(error)

    most_prompts = max(1, min(_STEPS * engine.get_load().max_running, _places(engine) // 2))
    most_tokens = most_queued_tokens(engine.max_queued_tokens, model.max_model_len)
    most_tokens = min(most_tokens // 2, _STEPS * model.max_num_batched_tokens)
    most_once = max(1, int(min(len(items), most_prompts, serving.shares.room(call.client))))
    with (
        serving.shares.place(call.client, most_once),
        serving.priority_of(call.client, call.priority, most_once) as priority,
    ):
        with engine.preparing(1):
            num_units = sum(len(item.first) + len(item.second or "") for item in items)
            if num_units <= LONG_TEXT:
                prompts = _prompts(items, call, model, most)
            else:
                prompts = await serving.off_loop(call.client, _prompts, items, call, model, most)
        num_tokens = sum(prompt.num_tokens for prompt in prompts)
        if serving.options.enable_log_requests:
            _log.info("request %s: %s, %d prompts of %d tokens", request_id, params.task, len(items), num_tokens)
        # Similar lengths together: steps are padded to the longest prompt.
        order = sorted(range(len(items)), key=lambda number: -prompts[number].num_tokens)
        tasks: set[asyncio.Task[None]] = set()
        num_begun = tokens_open = 0
        try:
            for num_ended in range(len(items)):
                for number in order[num_begun : num_ended + most_once]:
                    if tokens_open and tokens_open + prompts[number].num_tokens > most_tokens:
                        break
                    task = asyncio.create_task(work(number))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    num_begun, tokens_open = num_begun + 1, tokens_open + prompts[number].num_tokens
                output = await said.get()
                if isinstance(output, Exception):
                    raise output
                tokens_open -= prompts[output[0]].num_tokens
                yield output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def tasks_of(model: ModelInfo) -> tuple[PoolingTask, ...]:
    return (*model.tasks, "score") if "embed" in model.tasks else model.tasks


def _does(model: ModelInfo) -> str:
    return " and ".join(_DOES[task] for task in tasks_of(model))


def _task_of(call: PoolCall, model: ModelInfo, name: str) -> PoolingTask:
    check_kind(model, name, pools=True)
    task = model.tasks[0] if call.task is None else call.task
    if task not in tasks_of(model):
        raise FeatureDisabledError(f"The model {name} {_does(model)}; its task is not {task!r}.", "model")
    return task


def _check_inputs(call: PoolCall, most: int) -> None:
    if not 1 <= len(call.inputs) <= most:
        raise UserError(f"There may be 1 to {most} inputs in a call, got {len(call.inputs)}.", "inputs")
    if call.pairs is None:
        if call.task == "score":
            raise UserError("score compares two texts: give the second texts.", "pairs")
        return
    if len(call.pairs) != len(call.inputs) or not all(isinstance(text, str) for text in (*call.inputs, *call.pairs)):
        raise UserError("score compares texts in pairs: give as many second as first texts.", "pairs")


def has_room(serving: PoolSite, client: str, num_running: int) -> bool:
    """Return whether a client with `num_running` prompts of a stream may start another; always, if 0."""
    if not num_running:
        return True
    load = serving.engine.get_load()
    left = _places(serving.engine) - load.running - load.waiting
    most = min(_STEPS * load.max_running, left // 2, serving.shares.bound.share)
    return num_running < most and serving.shares.room(client) >= 1


def _places(engine: EngineClient) -> int:
    slots = engine.get_load().max_running
    return slots + most_queued(engine.max_queued_requests, slots)


def _most_tokens(call: PoolCall, longest: int) -> int:
    asked = call.truncate_prompt_tokens
    if asked is not None and asked > longest:
        message = f"truncate_prompt_tokens value ({asked}) is greater than max_model_len ({longest})."
        raise UserError(f"{message} Please select a smaller truncation size.", "truncate_prompt_tokens", asked)
    return longest if asked is None or asked == -1 else asked


def _prompts(items: Sequence[_Item], call: PoolCall, model: ModelInfo, most: int) -> list[_Prompt]:
    cuts, prompts = call.truncate_prompt_tokens is not None, list[_Prompt]()
    # Cached: a query repeats.
    cut = model.tokenizer.end_of if cuts and call.truncation_side == "left" else model.tokenizer.beginning_of
    needed = functools.cache(lambda text: cut(text, most))
    count = functools.cache(lambda text: len(model.tokenizer.encode(text, add_special_tokens=False)))
    num_around = len(model.tokenizer.encode_pair("", "")[0]) if items[0].second is not None else 0
    for item in items:
        try:
            first = needed(item.first) if isinstance(item.first, str) else item.first
            if item.second is None:
                prompt = _single(first, call, model, most, cuts)
            else:
                texts = str(first), needed(item.second)
                num_first, num_second = num_around + count(texts[0]), count(texts[1])
                if cuts and num_first >= most:
                    raise UserError(f"The first text is never cut, and leaves no room for the second in {most} tokens.")
                num_tokens = num_first + num_second
                prompt = _Prompt(min(num_tokens, most) if cuts else num_tokens, None, texts)
            if prompt.num_tokens > most:
                raise too_long(most, prompt.num_tokens, None, is_bound=prompt.num_tokens > most + TOKENS_AT_A_CUT)
        except UserError as error:
            if error.parameter in (None, "prompt"):
                error.parameter = item.parameter
            raise _naming(error, item, len(items)) from None
        prompts.append(prompt)
    return prompts


def _single(given: str | Sequence[int], call: PoolCall, model: ModelInfo, most: int, cuts: bool) -> _Prompt:
    tokenizer, is_left, kept = model.tokenizer, call.truncation_side == "left", most if cuts else None
    if not isinstance(given, str):
        ids = cut_ids(given, kept, call.truncation_side)
        if len(ids) > most:
            return _Prompt(len(ids), None)  # refused; converting millions of ids holds the GIL
        outside = next((token for token in ids if not 0 <= token < model.vocab_size), None)
        if outside is not None:
            raise UserError(f"Token id {outside} is out of vocabulary (0 to {model.vocab_size - 1}).")
    elif kept is not None and call.add_special_tokens:
        ids = (tokenizer.encode_last if is_left else tokenizer.encode_first)(given, kept)
    else:
        ids = cut_ids(tokenizer.encode(given, call.add_special_tokens), kept, call.truncation_side)
    if not ids:
        raise UserError("A prompt cannot be empty: there is no token in it.")
    return _Prompt(len(ids), np.array(ids, np.int32))  # pyright: ignore[reportArgumentType] - a tenth of a list's size


def _checked(output: PoolingRequestOutput) -> PoolingRequestOutput:
    told = output.outputs
    if told.finish_reason == "abort":
        raise UnavailableError("The request was aborted.")
    if told.finish_reason == "error" or not np.isfinite(told.data).all():
        why = told.stop_reason or "the model's numbers are not finite"
        raise RequestFailedError(f"The request failed, others go on: {why}.")
    return output


def _naming(error: Exception, item: _Item, num_items: int) -> Exception:
    if num_items > 1:
        error.args = (f"Input {item.index}: {error}",)
    return error
