"""Serve the calls of all protocols: check, complete the defaults, generate, and yield `Chunk`s."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.embedded import SHIPPED
from jaxllm.engine.engine_client import EngineClient
from jaxllm.engine.features.adapters.store import Adapter
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import NotFoundError, RequestFailedError, UserError, late, too_long
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text import fill_in_middle
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer
from jaxllm_server.access.client_quota import Shares, UrgentShares
from jaxllm_server.access.ledger import PROMPTS, REQUESTS, Entry, Ledger
from jaxllm_server.adapters import Served, ServedAdapters
from jaxllm_server.generation import beam_calls
from jaxllm_server.generation.calls import LARGE_REQUEST, Call, Chunk, is_forced
from jaxllm_server.generation.chat_checks import check_tools
from jaxllm_server.generation.forced_calls import blaming_tools, with_forced_calls
from jaxllm_server.generation.output_forms import OutputForms
from jaxllm_server.generation.prompts import Prompts
from jaxllm_server.observability.tracing import REQUEST_SPAN, current_span, request_attributes
from jaxllm_server.pooling.service import Pooling
from jaxllm_server.shared.options import ServerOptions, template_kwargs
from jaxllm_server.speech.service import Speech

Item = TypeVar("Item")
_log = logging.getLogger("jaxllm.server")
_TOKEN_BYTES = 56  # per prompt token: in a list, a tuple and the engine's arrays


class Serving:
    """Answers calls with one engine, which may still be loading."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        shipped = {path: name for name, path in SHIPPED.items()}
        self.root = shipped.get(Path(engine.config.model), engine.config.model)
        self.names = options.served_model_name or (_model_name(self.root),)
        self.adapters = ServedAdapters(engine, options, self.names)
        self.pooling = Pooling(self)
        self.speech = Speech(self)
        self.shares = Shares(options.max_sequences_per_client)
        self.urgent = UrgentShares()
        self.ledger = Ledger(options)
        num_keys = len(options.api_key) + len(options.admin_api_key)
        self._has_tenants = bool(options.api_key) and num_keys > 1
        self._template: str | None = None
        if options.chat_template is not None:
            self._template = Path(options.chat_template).read_text(encoding="utf-8")
        written = self._template, template_kwargs(options)
        self.forms = OutputForms(engine, options, *written)
        self._prompts = Prompts(engine, options, *written, self.off_loop)

    def check_model(self, name: str, adapter: str = "") -> str:
        """Return the adapter's name, or the first served name, as in vLLM; raise NotFoundError."""
        served = self._served(name, adapter)
        return self.names[0] if served is None else served.name

    def _served(self, model: str, adapter: str = "") -> Served | None:
        if model in self.adapters:
            if adapter and adapter != model:
                raise UserError("model names one adapter and adapter another.", "adapter")
            return self.adapters.find(model)
        if model and model not in self.names:
            raise NotFoundError(f"The model `{model[:128]}` does not exist; `{self.names[0]}` is served here.", "model")
        return self.adapters.find(adapter) if adapter else None

    def check_room(self, client: str, pools: bool | None = None) -> None:
        """Raise if the client has no quota left or the queue is full, before the body is read.

        `pools`: the request is for pooling, refused by a model that generates, or the reverse; None if unknown.
        """
        self.shares.check(client)
        self.engine.check_room()
        if pools is not None:
            self.pooling.check_kind(pools)

    def check_calls(self, calls: Sequence[Call], params: SamplingParams) -> None:
        """Raise unless quota and queue have room for all calls of a request, which differ in their prompts only.

        Called before the first is generated: a later failure would waste its work.
        """
        beams = beam_calls.beams_of(calls[0], params, self.engine.model.max_model_len)
        num_samples = len(calls) * (params.n if beams is None else beams.beam_width)
        self.shares.check(calls[0].client, num_samples)
        self.engine.check_queue(num_samples, 0, len(calls))

    def params_of(self, call: Call) -> SamplingParams:
        """Return the call's sampling parameters, completed from generation_config.json; raise UserError if refused.

        Those of a beam search or of forced calls are restricted accordingly.
        """
        given = dict(call.sampling)
        self._check_bounds(given)
        if call.scores_prompt:
            given["max_tokens"] = 1
        if "max_tokens" not in given:
            given["max_tokens"] = self.engine.model.generation_config.get("max_new_tokens") or call.default_max_tokens
        if call.beams is not None:
            beam_calls.check(call, given)
            return beam_calls.sampling_of(given)
        if is_forced(call.tool_choice):
            check_tools(call.tools, self.options.max_tools)
            given = with_forced_calls(call, given)
        kind = RequestOutputKind.DELTA if call.stream else RequestOutputKind.FINAL_ONLY
        with blaming_tools(call):
            return replace(self.engine.model.default_params, **given, output_kind=kind)

    async def completed(self, call: Call) -> SamplingParams:
        return await self._large(call, self.params_of, call)

    async def generate(self, call: Call, params: SamplingParams | None = None) -> AsyncGenerator[Chunk]:
        """Yield the answer in chunks; `params` is from `completed`. Closing the iterator aborts the request."""
        served = self._served(call.model, call.adapter)
        self.check_text("request_id", call.request_id)
        self.check_text("cache_salt", call.cache_salt)
        arrival = time.monotonic()
        await self.engine.check_health()
        self.pooling.check_kind(pools=False)
        params = await self.completed(call) if params is None else params
        self.forms.check(call, params)
        beams = beam_calls.beams_of(call, params, self.engine.model.max_model_len)
        num_outputs = params.n if beams is None else beams.beam_width
        with (
            self.adapters.using(served),
            self.shares.place(call.client, num_outputs),
            self._entry_of(call) as entry,
            self.priority_of(call.client, call.priority, num_outputs) as priority,
        ):
            with self.engine.preparing(num_outputs):
                adapter = await self._adapter(served, call.client)
                model = self.engine.model if adapter is None else adapter.language.model
                prompt = await self.prompt_of(call, params, model)
            self._check_length(call, params, prompt)
            params = self.bounded(call, params, len(prompt["prompt_token_ids"]))
            if call.suffix is not None and not params.ignore_eos:
                stop_ids = (*params.stop_token_ids, *fill_in_middle.stop_ids(model.tokenizer))
                params = replace(params, stop_token_ids=stop_ids)
            said = prompt.get("prompt")
            media = prompt.get("multi_modal_data", {})
            images = [each for kind, own in media.items() if kind != "video" for each in own]
            images += (pair for video in media.get("video", ()) for pair in video.pairs)
            entry.charge(REQUESTS, sum(each.pixels.nbytes for each in images))
            source = prompt.get("encoder_prompt", {})
            num_tokens = len(prompt["prompt_token_ids"]) + len(source.get("prompt_token_ids", ()))
            num_bytes = len(said or "") + len(source.get("prompt") or "")
            entry.charge(PROMPTS, num_bytes + _TOKEN_BYTES * num_tokens)
            if said is None and call.messages is not None and self.forms.reasoning_form is not None:
                ids = prompt["prompt_token_ids"]  # may open the reasoning
                confined = model.tokenizer.confined
                said = await self.off_loop(call.client, model.tokenizer.decode, ids, False, language=confined)
            reader = self.forms.reader(call, params, said or "", model.tokenizer)
            if reader.shows_markers:
                params = replace(params, skip_special_tokens=False)
                beams = beams and replace(beams, skip_special_tokens=False)
            if params.structured_outputs is not None:
                given = call, params.structured_outputs, said or "", reader.may_reason, model.tokenizer
                of_output = await self._large(call, self.forms.constraint, *given)
                params = replace(params, structured_outputs=of_output)
            request_id = call.request_id or uuid.uuid4().hex
            outputs = self.engine.generate(
                prompt,
                params if beams is None else beams,
                request_id,
                owner=self.owner_of(call.client),
                client=call.client,
                priority=priority,
                time_limit=call.time_limit,
                timeout=self.options.request_timeout or None,
                arrival=arrival,
                name=f"{request_id} ({call.client_id})" if call.client_id else None,
                lora_request=None if served is None else served.request,
                kv_transfer_params=call.kv_transfer_params,
            )
            if self.options.enable_log_requests:
                num_prompt, own = len(prompt["prompt_token_ids"]), "" if served is None else f"adapter {served.name}, "
                shown = given_of(params) if beams is None else beams
                _log.info("request %s: %s%d prompt tokens, %s", request_id, own, num_prompt, shown)
            with blaming_tools(call), beam_calls.blaming_n():
                async with aclosing(outputs):
                    async for output in outputs:
                        chunk = reader.read(output)
                        if chunk.is_last:
                            counts = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                            name = self.names[0] if served is None else served.name
                            facts = request_attributes(request_id, name, params, output.metrics, *counts)
                            if served is not None:
                                self.adapters.note_finished(served)
                            current_span().set(facts, name=REQUEST_SPAN)
                        yield chunk

    def priority_of(self, client: str, priority: int, num_outputs: int) -> AbstractContextManager[int]:
        """Yield the effective priority; with several API keys, urgent requests are limited."""
        if priority >= 0 or not self._has_tenants:
            return nullcontext(priority)
        return self.urgent.place(client, priority, num_outputs, self.engine.get_load().max_running)

    @contextmanager
    def _entry_of(self, call: Call) -> Iterator[Entry]:
        if call.entry is not None:
            yield call.entry
            return
        with self.ledger.entry(call.client) as entry:
            entry.charge(REQUESTS, 2 * call.num_bytes)
            yield entry

    @property
    def tasks(self) -> Sequence[str]:
        return self.pooling.tasks or ("generate",)

    async def prompt_of(
        self, call: Call, params: SamplingParams | None = None, model: ModelInfo | None = None
    ) -> dict[str, Any]:
        """Return the engine's prompt: token ids, text if known, cache salt.

        Raises UserError if it exceeds the context and `params` do not truncate it. `model` is the adapter's.
        """
        return {**await self._prompts.prompt_of(call, params, model), **self.salt_of(call.client, call.cache_salt)}

    async def _adapter(self, served: Served | None, client: str) -> Adapter | None:
        """Return the engine's adapter, read again if evicted; None for the base model."""
        if served is None:
            return None
        try:
            found = self.engine.find_adapter(served.request)
            return found or await self.off_loop(client, self.engine.read_adapter, served.request, language=b"")
        except UserError as error:  # hides its path
            _log.error("%s", error)
            raise RequestFailedError("The adapter could not be read again; the server's log has the reason.") from error

    async def _model_of(self, name: str, client: str) -> ModelInfo:
        served = self._served(name)
        with self.adapters.using(served):
            adapter = await self._adapter(served, client)
            return self.engine.model if adapter is None else adapter.language.model

    async def _large(self, call: Call, function: Callable[..., Item], *arguments: Any) -> Item:
        if call.num_bytes > LARGE_REQUEST:
            return await self.off_loop(call.client, function, *arguments)
        return function(*arguments)

    async def off_loop(
        self, client: str, function: Callable[..., Item], *arguments: Any, language: bytes | None = None
    ) -> Item:
        """Run a function in a thread of the engine's; raise DeadlineError after the request timeout."""
        try:
            async with asyncio.timeout(self.options.request_timeout or None):
                return await self.engine.off_loop(function, *arguments, client=client, language=language)
        except TimeoutError as error:
            raise late(self.options.request_timeout) from error

    def owner_of(self, client: str) -> str:
        """Return the scope of unique request ids: the client if keys distinguish clients, else ""."""
        return client if self._has_tenants else ""

    def salt_of(self, client: str, given: str | None) -> dict[str, str]:
        """Return the prefix cache's salt.

        With several API keys it begins with the client's name; a caller's salt has no colon, so it cannot equal another
        client's.
        """
        if self._has_tenants and not self.options.share_prefix_cache:
            return {"cache_salt": f"{client}:{given or ''}"}
        return {} if given is None else {"cache_salt": given}

    async def tokenize(self, call: Call) -> list[int]:
        self.check_model(call.model)
        await self.engine.check_health()
        model = await self._model_of(call.model, call.client)
        prompt = await self.prompt_of(call, model=model)
        return list(prompt.get("encoder_prompt", prompt)["prompt_token_ids"])

    async def tokenizer_of(self, name: str, client: str = "") -> Tokenizer:
        await self.engine.check_health()
        return (await self._model_of(name, client)).tokenizer

    async def tokenizer_info(self, client: str = "") -> dict[str, Any]:
        config = (await self.tokenizer_of("", client)).config()
        return config if self._template is None else config | {"chat_template": self._template}

    async def detokenize(self, ids: Sequence[int], client: str = "", model: str = "") -> str:
        tokenizer = await self.tokenizer_of(model, client)
        vocab_size, longest = self.engine.model.vocab_size, self.engine.model.max_model_len
        if len(ids) > longest:
            raise UserError(f"tokens may hold at most {longest} ids, got {len(ids)}.", "tokens")
        if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
            raise UserError(f"tokens must be integers from 0 to {vocab_size - 1}.", "tokens")
        return await self.engine.off_loop(tokenizer.decode, ids, False, client=client, language=tokenizer.confined)

    async def echo(self, prompt: str | Sequence[int], client: str, model: str) -> str:
        """Return a prompt's text for `echo`; empty without a tokenizer."""
        if isinstance(prompt, str):
            return prompt
        if isinstance(await self.tokenizer_of(model, client), NoTokenizer):
            return ""
        return await self.detokenize(prompt, client, model)

    def _check_bounds(self, given: Mapping[str, Any]) -> None:
        """Check sizes before objects of these sizes are built."""
        options = self.options
        n, stops, ids = given.get("n"), given.get("stop"), given.get("stop_token_ids")
        allowed, vocab_size = given.get("allowed_token_ids"), self.engine.model.vocab_size
        most = min(options.max_n, options.most_sequences)
        if isinstance(n, int) and n > most:
            raise UserError(f"n must be at most {most}, got {n}.", "n", n)
        if isinstance(stops, list | tuple) and len(stops) > options.max_stops:
            raise UserError(f"stop may hold at most {options.max_stops} strings, got {len(stops)}.", "stop")
        for stop in [stops] if isinstance(stops, str) else stops if isinstance(stops, list | tuple) else ():
            if isinstance(stop, str) and len(stop) > options.max_stop_chars:
                raise UserError(f"a stop string may have at most {options.max_stop_chars} characters.", "stop")
        if isinstance(ids, list | tuple) and len(ids) > options.max_stop_token_ids:
            raise UserError(f"stop_token_ids may hold at most {options.max_stop_token_ids} ids.", "stop_token_ids")
        if isinstance(allowed, list | tuple) and len(allowed) > vocab_size:
            message = f"allowed_token_ids may hold at most {vocab_size} ids, as many as there are."
            raise UserError(message, "allowed_token_ids")

    def check_text(self, name: str, value: str | None) -> None:
        most = self.options.max_request_id_chars
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= most or not _is_plain(value)):
            raise UserError(f"{name} must be 1 to {most} characters of A-Z, a-z, 0-9, '.', '_' and '-'.", name)

    def _check_length(self, call: Call, params: SamplingParams, prompt: Mapping[str, Any]) -> None:
        ids = prompt["prompt_token_ids"]
        asked = params.max_tokens if "max_tokens" in call.sampling and not call.may_fill_context else None
        is_cut = params.truncate_prompt_tokens is not None
        longest = self.engine.model.max_model_len
        if asked is not None and not is_cut and isinstance(ids, Sequence) and len(ids) + asked > longest:
            raise too_long(longest, len(ids), asked)

    def bounded(self, call: Call, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Raise if the answer could hold too many log-probabilities; those of streams do not count.

        Without a `max_tokens` of the client, reduces it so that the answer fits.
        """
        model = self.engine.model
        per_prompt, per_output = (
            0 if asked is None else 1 + (model.vocab_size if asked == -1 else asked)
            for asked in (params.prompt_logprobs, None if call.stream else params.logprobs)
        )
        room = max(1, model.max_model_len - num_prompt)
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        values = num_prompt * per_prompt
        if params.n * per_output and ("max_tokens" not in call.sampling or call.may_fill_context):
            left = call.answer_size.left(values, model.max_model_len) // (params.n * per_output)
            if max(1, params.min_tokens) <= left < most:
                most, params = left, replace(params, max_tokens=left)
        call.answer_size.add(values, params.n * most * per_output, model.max_model_len)
        return params


def given_of(params: SamplingParams) -> dict[str, Any]:
    shown = {own.name: (getattr(params, own.name), own.default) for own in fields(params)}
    given = {name: value for name, (value, default) in shown.items() if value != default and name != "output_kind"}
    if params.structured_outputs is not None:
        given["structured_outputs"] = params.structured_outputs.kind
    return given


def _model_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model


def _is_plain(text: str) -> bool:
    return text.isascii() and all(character.isalnum() or character in "._-" for character in text)
