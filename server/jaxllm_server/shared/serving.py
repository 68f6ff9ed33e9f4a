"""What both protocols share: a `Call` is checked, completed with the defaults, generated, and answered in `Chunk`s.

Owns the bounds of a request, the served names, and the split of a model's text into reasoning, content and tool calls.
Knows nothing of messages, status codes or connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from jaxllm.embedded import SHIPPED
from jaxllm.engine.adapters import Adapter
from jaxllm.engine.async_llm import LONG_TEXT, AsyncLLM
from jaxllm.engine.input_processor import num_kept, text_to_encode
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import checked_ids
from jaxllm.errors import FeatureDisabledError, NotFoundError, RequestFailedError, UserError, late, too_long
from jaxllm.outputs import RequestMetrics, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text import fill_in_middle
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.observability.tracing import REQUEST_SPAN, current_span, request_attributes
from jaxllm_server.parsers import table
from jaxllm_server.parsers.forced_calls import NamedCall, RequiredCalls
from jaxllm_server.parsers.harmony import AnalysisTokens
from jaxllm_server.parsers.reasoning import ReasoningParser, ReasoningTokens
from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, ReasoningForm, ToolForm
from jaxllm_server.parsers.tool_parsers import MakeId, ToolCallDelta, ToolParser
from jaxllm_server.shared import beam_calls, pool_stream, pooling
from jaxllm_server.shared.adapters import Served, ServedAdapters
from jaxllm_server.shared.calls import Call, Chunk, Finish, NamedTool, Part, PromptInfo, Timing, Usage, is_forced
from jaxllm_server.shared.chat_checks import (
    check_messages,
    check_template_kwargs,
    check_tools,
    texts_of,
    with_parsed_arguments,
)
from jaxllm_server.shared.client_quota import FairShares, Shares
from jaxllm_server.shared.forced_calls import blaming_tools, with_forced_calls
from jaxllm_server.shared.options import ServerOptions, template_kwargs
from jaxllm_server.shared.pool_calls import PoolCall, PoolResult
from jaxllm_server.shared.truncation import cut_ids

Item = TypeVar("Item")
_CallReader: TypeAlias = ToolParser | NamedCall
_log = logging.getLogger("jaxllm.server")
_NO_TEMPLATE = (
    "This model has no chat template: send a text instead of messages (/v1/completions, over gRPC `text`), or start "
    "the server with --chat-template."
)
_ENDING = 64  # tokens of a prompt that came as ids, by whose text it is seen whether the prompt opens the reasoning
LEFT_OUT = 4  # times the context that a conversation may be, because templates may leave parts of it out


class Serving:
    """Answers calls with one engine. It can be made while the engine is still loading."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        shipped = {path: name for name, path in SHIPPED.items()}
        self.root = shipped.get(Path(engine.config.model), engine.config.model)
        self.names = options.served_model_name or (_model_name(self.root),)
        self.adapters = ServedAdapters(engine, options, self.names)
        self._template_kwargs = template_kwargs(options)
        self.shares = Shares(options.max_sequences_per_client)
        self.pool_shares = FairShares()
        num_keys = len(options.api_key) + len(options.admin_api_key)
        self._has_tenants = bool(options.api_key) and num_keys > 1
        self._template: str | None = None
        if options.chat_template is not None:
            self._template = Path(options.chat_template).read_text(encoding="utf-8")
        table.check_name("tool_call_parser", options.tool_call_parser, TOOL_PARSERS)
        table.check_name("reasoning_parser", options.reasoning_parser, REASONING_PARSERS)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls; None where none are read. Known once the model is loaded.

        Raises:
            UserError: naming `tool_call_parser`, if it is to be chosen by a template that none is written for.
        """
        name = self._form_name("tool_call_parser", TOOL_PARSERS)
        return None if name is None else TOOL_PARSERS[name]

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """How the model writes its reasoning; as `tool_form`."""
        name = self._form_name("reasoning_parser", REASONING_PARSERS)
        return None if name is None else REASONING_PARSERS[name]

    def check_forms(self) -> None:
        """Choose the parsers that `auto` asks for, now that the model is loaded.

        Raises:
            UserError: naming the parameter whose choice there is none for.
        """
        _ = self.tool_form, self.reasoning_form

    def _form_name(self, parameter: str, forms: Mapping[str, ToolForm] | Mapping[str, ReasoningForm]) -> str | None:
        name = getattr(self.options, parameter)
        if name != table.AUTO:
            return name
        templates = self.engine.model.tokenizer.chat_templates
        template = self._template or templates.get("tool_use") or templates.get("default") or ""
        chosen = table.form_of(template, forms)
        if chosen is None:
            message = f"{parameter}=auto: no parser is for the model's chat template; name one of {', '.join(forms)}."
            raise UserError(message, parameter)
        _log.info("%s: %s, by the chat template", parameter, chosen)
        return chosen

    def check_model(self, name: str, adapter: str = "") -> str:
        """Return the name that answers give: the adapter's, else the model's first one as vLLM's do.

        What is not served is a NotFoundError.
        """
        served = self._served(name, adapter)
        return self.names[0] if served is None else served.name

    def _served(self, model: str, adapter: str = "") -> Served | None:
        """Return the adapter that a request asks for, as its model or by a field of its own."""
        if model in self.adapters:
            if adapter and adapter != model:
                raise UserError("model names one adapter and adapter another.", "adapter")
            return self.adapters.find(model)
        if model and model not in self.names:
            raise NotFoundError(f"The model `{model[:128]}` does not exist; `{self.names[0]}` is served here.", "model")
        return self.adapters.find(adapter) if adapter else None

    def check_room(self, client: str, pools: bool | None = None) -> None:
        """Refuse what no request of a client could pass now, or ever; asked before anything of one is read.

        `pools` says of which kind the request is, where that is known.
        """
        self.shares.check(client)
        self.engine.check_room()
        if pools is not None:
            pooling.check_kind(self.engine.model, self.names[0], pools)

    def check_calls(self, calls: Sequence[Call]) -> None:
        """Refuse one request's calls, which differ in their prompts alone, unless there is room for all of them.

        Asked before the first is generated: one for which there is no room fails the request, and what the others
        have cost is lost.
        """
        params = self.params_of(calls[0])
        beams = beam_calls.beams_of(calls[0], params, self.engine.model.max_model_len)
        num_samples = len(calls) * (params.n if beams is None else beams.beam_width)
        self.shares.check(calls[0].client, num_samples)
        self.engine.check_queue(num_samples, 0, len(calls))

    def params_of(self, call: Call) -> SamplingParams:
        """Complete a call's sampling: what it gives, then the model's generation_config.json, then neutral values."""
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

    async def generate(self, call: Call) -> AsyncGenerator[Chunk]:
        """Answer a call, in one chunk or as it comes. To close the iterator aborts the request."""
        served = self._served(call.model, call.adapter)
        self.check_text("request_id", call.request_id)
        self.check_text("cache_salt", call.cache_salt)
        arrival = time.monotonic()
        await self.engine.check_health()
        pooling.check_kind(self.engine.model, self.names[0], pools=False)
        params = self.params_of(call)
        self._check_splitting(call, params)
        beams = beam_calls.beams_of(call, params, self.engine.model.max_model_len)
        num_outputs = params.n if beams is None else beams.beam_width
        with self.adapters.using(served), self.shares.place(call.client, num_outputs):
            with self.engine.preparing(num_outputs):
                adapter = await self._adapter(served, call.client)
                model = self.engine.model if adapter is None else adapter.language.model
                prompt = await self.prompt_of(call, params, model)
            self._check_length(call, params, prompt)
            if call.suffix is not None and not params.ignore_eos:
                stop_ids = (*params.stop_token_ids, *fill_in_middle.stop_ids(model.tokenizer))
                params = replace(params, stop_token_ids=stop_ids)
            said = prompt.get("prompt")
            if said is None and call.messages is not None:
                said = model.tokenizer.decode(prompt["prompt_token_ids"][-_ENDING:], skip_special_tokens=False)
            reader = self._reader(call, params, said or "", model.tokenizer)
            if reader.shows_markers:
                params = replace(params, skip_special_tokens=False)
                beams = beams and replace(beams, skip_special_tokens=False)
            if reader.may_reason and params.structured_outputs is not None:
                after = replace(params.structured_outputs, begin_after=reader.begin_after)
                params = replace(params, structured_outputs=after)
            request_id = call.request_id or uuid.uuid4().hex
            outputs = self.engine.generate(
                prompt,
                params if beams is None else beams,
                request_id,
                owner=self.owner_of(call.client),
                client=call.client,
                priority=call.priority,
                time_limit=call.time_limit,
                timeout=self.options.request_timeout or None,
                arrival=arrival,
                name=f"{request_id} ({call.client_id})" if call.client_id else None,
                lora_request=None if served is None else served.request,
            )
            if self.options.enable_log_requests:
                num_prompt, own = len(prompt["prompt_token_ids"]), "" if served is None else f"adapter {served.name}, "
                given = given_of(params) if beams is None else beams
                _log.info("request %s: %s%d prompt tokens, %s", request_id, own, num_prompt, given)
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

    def pool(self, call: PoolCall) -> AsyncGenerator[PoolResult]:
        """Embed, classify or score a call's inputs. To close the iterator aborts what is left."""
        return pooling.pool(self, call)

    async def pool_stream(
        self, requests: AsyncIterator[Item], read: Callable[[Item], PoolCall], client: str
    ) -> AsyncGenerator[pool_stream.Answer[Item]]:
        """Return the answers to any number of requests that a client sends, unless the engine takes none."""
        await self.engine.check_health()
        return pool_stream.answers(self, requests, read, client)

    @property
    def tasks(self) -> Sequence[str]:
        """What the model can be asked for."""
        model = self.engine.model
        return ("generate",) if model.pooler is None else pooling.tasks_of(model)

    async def prompt_of(
        self, call: Call, params: SamplingParams | None = None, model: ModelInfo | None = None
    ) -> dict[str, Any]:
        """Return a call's prompt for the engine: its token ids, its text where there is one, and its salt.

        What cannot fit into the context is refused before it is tokenized, or cut where `params` say so. `model` is
        the model as the call's adapter has it.
        """
        model = self.engine.model if model is None else model
        tokenizer, salt = model.tokenizer, self.salt_of(call)
        if (call.prompt is None) == (call.messages is None):
            raise UserError("A request has either a prompt or messages.", "prompt")
        longest = self.engine.model.max_model_len
        kept = None if params is None else num_kept(params, longest)
        if call.messages is not None and call.written_ids is not None:
            if call.tools is not None:
                check_tools(call.tools, self.options.max_tools)
            ids = cut_ids(call.written_ids, kept, call.truncation_side)
            if len(ids) >= longest:
                raise too_long(longest, len(ids), None)
            return {"prompt_token_ids": checked_ids(ids, model.vocab_size), **salt}
        if call.messages is not None:
            if self._template is None and not tokenizer.has_chat_template:
                raise UserError(_NO_TEMPLATE, "messages")
            if call.tools is not None:
                check_tools(call.tools, self.options.max_tools)
            check_template_kwargs(call.template_kwargs)
            # Templates may leave words out, old reasoning for one: what is far too long is no conversation.
            most = LEFT_OUT * longest + 4096
            check_messages(call.messages, longest, most)
            text, ids = await self.off_loop(call.client, self._encode_chat, call, most, tokenizer)
            if call.truncation_side == "right" and kept is not None and len(ids) > kept:
                return {"prompt_token_ids": ids[:kept], **salt}  # the text is another one now
            return {"prompt": text, "prompt_token_ids": ids, **salt}
        if not isinstance(call.prompt, str) and call.suffix is None:
            return {"prompt_token_ids": cut_ids(call.prompt or (), kept, call.truncation_side), **salt}
        text, ids = await self._encode_text(call, params or SamplingParams(), tokenizer)
        return {"prompt": text, "prompt_token_ids": ids, **salt}

    async def _encode_text(self, call: Call, params: SamplingParams, tokenizer: Tokenizer) -> tuple[str, Sequence[int]]:
        """Return what of a prompt's text is needed, and its token ids."""
        add, longest = call.add_special_tokens is not False, self.engine.model.max_model_len
        kept, before = num_kept(params, longest), call.prompt if isinstance(call.prompt, str) else ""
        if call.suffix is not None:
            text = before + call.suffix
            tokenizer.check_length(text, longest)
            encode = partial(fill_in_middle.encode, tokenizer, call.prompt or "", call.suffix, add)
        elif kept is not None and call.truncation_side == "right":
            text = before
            encode = partial(_encode_beginning, tokenizer, text, kept, add)
        else:
            text = text_to_encode(before, params, tokenizer, longest)
            encode = partial(tokenizer.encode, text, add)
        return text, await self.off_loop(call.client, encode) if len(text) > LONG_TEXT else encode()

    def _encode_chat(self, call: Call, most: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Write out a conversation of `most` tokens, and return its token ids as well; slow.

        A template may show any of its texts, and what none shows is copied and searched for special tokens all the
        same: an ignored key of 1,300,000 empty lists took 16 s.
        """
        tools = call.tools if call.tool_choice != "none" else None
        messages = with_parsed_arguments(call.messages or (), self.options.max_json_depth)
        tokenizer.check_length("".join(texts_of([messages, tools])), self.engine.model.max_model_len, most)
        return tokenizer.encode_chat(
            messages,
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            tools=tools,
            chat_template=self._template,
            chat_template_kwargs={**self._template_kwargs, **call.template_kwargs},
            add_special_tokens=bool(call.add_special_tokens),
        )

    async def _adapter(self, served: Served | None, client: str) -> Adapter | None:
        """Return a request's adapter, which is read again if it is not in the host's memory any more."""
        if served is None:
            return None
        store = self.engine.engine.adapters
        try:
            return store.find(served.request) or await self.off_loop(client, store.get, served.request)
        except UserError as error:  # it could be read once; its folder is not the client's business
            _log.error("%s", error)
            raise RequestFailedError("The adapter could not be read again; the server's log has the reason.") from error

    async def _model_of(self, name: str, client: str) -> ModelInfo:
        """Return the model as requests under a name see it."""
        served = self._served(name)
        with self.adapters.using(served):
            adapter = await self._adapter(served, client)
            return self.engine.model if adapter is None else adapter.language.model

    async def off_loop(self, client: str, function: Callable[..., Item], *arguments: Any) -> Item:
        """Run what makes a client's prompt beside the event loop; to wait for a thread takes from its time as well."""
        try:
            async with asyncio.timeout(self.options.request_timeout or None):
                return await self.engine.off_loop(function, *arguments, client=client)
        except TimeoutError as error:
            raise late(self.options.request_timeout) from error

    def owner_of(self, client: str) -> str:
        """Return whose a request's id is: its client's if keys distinguish clients, else everybody's."""
        return client if self._has_tenants else ""

    def salt_of(self, call: Call | PoolCall) -> dict[str, str]:
        """Return a call's salt of the prefix cache: its own, with the client's name if there are several keys.

        The colon is in no salt that a caller can give, so a caller cannot name another client's.
        """
        if self._has_tenants and not self.options.share_prefix_cache:
            return {"cache_salt": f"{call.client}:{call.cache_salt or ''}"}
        return {} if call.cache_salt is None else {"cache_salt": call.cache_salt}

    async def tokenize(self, call: Call) -> list[int]:
        """Return the token ids of a call's prompt or messages."""
        self.check_model(call.model)
        await self.engine.check_health()
        model = await self._model_of(call.model, call.client)
        return list((await self.prompt_of(call, model=model))["prompt_token_ids"])

    async def tokenizer_of(self, name: str, client: str = "") -> Tokenizer:
        """Return the tokenizer of a model, or of an adapter."""
        await self.engine.check_health()
        return (await self._model_of(name, client)).tokenizer

    async def tokenizer_info(self, client: str = "") -> dict[str, Any]:
        """Return what a tokenizer_config.json says of the model's tokenizer, with the chat template that is used."""
        config = (await self.tokenizer_of("", client)).config()
        return config if self._template is None else config | {"chat_template": self._template}

    async def detokenize(self, ids: Sequence[int], client: str = "", model: str = "") -> str:
        """Return the text of token ids that a client gave, special tokens included."""
        tokenizer = await self.tokenizer_of(model, client)
        vocab_size, longest = self.engine.model.vocab_size, self.engine.model.max_model_len
        if len(ids) > longest:
            raise UserError(f"tokens may hold at most {longest} ids, got {len(ids)}.", "tokens")
        if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
            raise UserError(f"tokens must be integers from 0 to {vocab_size - 1}.", "tokens")
        return await self.engine.off_loop(tokenizer.decode, ids, False, client=client)

    def _check_bounds(self, given: Mapping[str, Any]) -> None:
        """Refuse what is more than this server takes, before anything of that size is made."""
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
        """Refuse names that are long or would be unreadable in a log."""
        most = self.options.max_request_id_chars
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= most or not _is_plain(value)):
            raise UserError(f"{name} must be 1 to {most} characters of A-Z, a-z, 0-9, '.', '_' and '-'.", name)

    def _check_length(self, call: Call, params: SamplingParams, prompt: Mapping[str, Any]) -> None:
        """Refuse a number of output tokens that the client named and the context does not hold."""
        ids = prompt["prompt_token_ids"]
        asked = params.max_tokens if "max_tokens" in call.sampling and not call.may_fill_context else None
        is_cut = params.truncate_prompt_tokens is not None
        longest = self.engine.model.max_model_len
        if asked is not None and not is_cut and isinstance(ids, Sequence) and len(ids) + asked > longest:
            raise too_long(longest, len(ids), asked)

    def _check_splitting(self, call: Call, params: SamplingParams) -> None:
        """Refuse tools if there is no parser for the model's calls; those that are forced have a form of ours."""
        has_tools = _has_tools(call)
        if has_tools and self.options.tool_call_parser is None and not is_forced(call.tool_choice):
            raise FeatureDisabledError(
                "This server was started without --tool-call-parser, so it cannot answer with tool calls.", "tools"
            )
        if has_tools and not params.detokenize:
            raise UserError("Tool calls are read from the text: leave detokenize on.", "detokenize")

    def _reader(self, call: Call, params: SamplingParams, prompt: str, tokenizer: Tokenizer) -> _Reader:
        return _Reader(
            call,
            params,
            tokenizer,
            self._tool_parser(call),
            self.reasoning_form if call.messages is not None else None,
            prompt,
            _is_switched_off({**self._template_kwargs, **call.template_kwargs}),
        )

    def _tool_parser(self, call: Call) -> Callable[[], _CallReader] | None:
        """Return what makes a reader of an output's tool calls; None where none are looked for."""
        form = self.tool_form
        make_id = partial(_id_maker, "" if form is None else form.ids, call.messages or ())
        if isinstance(call.tool_choice, NamedTool):
            name = call.tool_choice.name
            return lambda: NamedCall(make_id(), name)
        if call.tool_choice == "required":
            return lambda: RequiredCalls(make_id())
        if form is None or not _has_tools(call):
            return None
        return lambda: form.parser(make_id(), call.tools or ())


class _Reader:
    """Turns one request's outputs into chunks."""

    def __init__(
        self,
        call: Call,
        params: SamplingParams,
        tokenizer: Tokenizer,
        tool_parser: Callable[[], _CallReader] | None,
        reasoning: ReasoningForm | None,
        prompt: str,
        is_switched_off: bool,
    ) -> None:
        self._call = call
        self._params = params
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._reasoning = None if reasoning is None else reasoning.form
        self._prompt = prompt
        self.may_reason = self._reasoning is not None and self._reasoning.may_reason(prompt, is_switched_off)
        self.begin_after = None if self._reasoning is None else self._reasoning.begin_after(is_forced(call.tool_choice))
        self._usage = Usage()
        self._is_first = True
        self._splitters: dict[int, _Splitter] = {}
        self._num_tokens: dict[int, int] = {}
        self.shows_markers = any(tokenizer.is_special(marker) for marker in self._make_splitter().markers)

    def read(self, output: RequestOutput) -> Chunk:
        """Return what is new in an output."""
        usage = self._usage
        usage.prompt_tokens = len(output.prompt_token_ids)
        usage.cached_prompt_tokens = output.num_cached_tokens or 0
        parts = []
        for completion in output.outputs:
            index = completion.index
            usage.completion_tokens += len(completion.token_ids)
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(completion.token_ids)
            if index not in self._splitters:
                self._splitters[index] = self._make_splitter()
            splitter = self._splitters[index]
            text, reasoning, calls = splitter.push(completion.text, completion.finish_reason is not None)
            num_reasoning = splitter.count_reasoning(completion.token_ids)
            usage.reasoning_tokens += num_reasoning
            parts.append(
                Part(
                    index=index,
                    text=text,
                    reasoning=reasoning if self._call.include_reasoning else "",
                    tool_calls=calls,
                    token_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    finish_reason=self._finish_reason(completion.finish_reason, index, splitter.num_calls),
                    stop_reason=completion.stop_reason,
                    seed=completion.seed,
                    num_reasoning=num_reasoning,
                )
            )
        prompt = None
        if self._is_first:
            ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
            first_text = "" if logprobs is None else self._tokenizer.token_text(ids[0])
            prompt = PromptInfo(ids, usage.cached_prompt_tokens, logprobs, first_text)
        self._is_first = False
        return Chunk(
            request_id=output.request_id,
            outputs=parts,
            prompt=prompt,
            usage=replace(usage),
            timing=_timing(output.metrics) if output.finished and output.metrics else None,
            is_last=output.finished,
        )

    def _finish_reason(self, reason: str | None, index: int, num_calls: int) -> Finish | None:
        if reason == "length":
            most = self._params.max_tokens
            return "length" if most is not None and self._num_tokens[index] >= most else "context"
        if reason == "stop" and num_calls:
            return "tool_calls"
        return reason  # pyright: ignore[reportReturnType] - "error" never comes here: the engine raises it

    def _make_splitter(self) -> _Splitter:
        tools = None if self._tool_parser is None else self._tool_parser()
        form = self._reasoning
        if form is None:
            return _Splitter(None, tools, None)
        return _Splitter(form.parser(self._prompt), tools, form.counter(self._tokenizer.token_id))


class _Splitter:
    """Splits one output's text into content, reasoning and tool calls."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: _CallReader | None,
        tokens: ReasoningTokens | AnalysisTokens | None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._tokens = tokens  # of the reasoning
        self.num_calls = 0
        self.markers = (*(reasoning.markers if reasoning else ()), *(tools.markers if tools else ()))

    def push(self, text: str, is_last: bool) -> tuple[str, str, list[ToolCallDelta]]:
        """Take in more text; return the content, the reasoning and the calls that are certain now."""
        content, reasoning = text, ""
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(text)
            if is_last:
                last = self._reasoning.finish()
                reasoning, content = reasoning + last[0], content + last[1]
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            content, calls = self._tools.push(content)
            if is_last:
                rest, last_calls = self._tools.finish()
                content, calls = content + rest, calls + last_calls
            self.num_calls += sum(call.name is not None for call in calls)
        return content, reasoning, calls

    def count_reasoning(self, ids: Sequence[int]) -> int:
        """Count those of new tokens that are reasoning, after their text was pushed."""
        if self._tokens is None or self._reasoning is None:
            return 0
        return self._tokens.count(ids, self._reasoning.is_reasoning)


def _encode_beginning(tokenizer: Tokenizer, text: str, most: int, add_special_tokens: bool) -> list[int]:
    return tokenizer.encode(tokenizer.beginning_of(text, most), add_special_tokens)[:most]


def _has_tools(call: Call) -> bool:
    return bool(call.tools) and call.tool_choice != "none"


def _is_switched_off(template_kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversation asks for no reasoning, by the variables that templates have for it."""
    is_named = any(template_kwargs.get(name) is False for name in ("enable_thinking", "thinking"))
    return is_named or template_kwargs.get("reasoning_effort") == "none"


def given_of(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not at their defaults."""
    shown = {own.name: (getattr(params, own.name), own.default) for own in fields(params)}
    given = {name: value for name, (value, default) in shown.items() if value != default and name != "output_kind"}
    if params.structured_outputs is not None:
        given["structured_outputs"] = params.structured_outputs.kind  # a schema can be long
    return given


def _timing(metrics: RequestMetrics) -> Timing:
    end = metrics.finished_time or metrics.arrival_time
    scheduled = metrics.first_scheduled_time or end
    first = metrics.first_token_time or end
    return Timing(
        queue=max(0.0, scheduled - metrics.arrival_time),
        prefill=max(0.0, first - scheduled),
        first_token=first - metrics.arrival_time,
        total=end - metrics.arrival_time,
    )


def _id_maker(style: str, messages: Sequence[Any]) -> MakeId:
    """Return what makes the ids of one output's calls, which the conversation is expected to bring back.

    Mistral's templates refuse ids that are not nine letters and digits; Kimi's write an id where the model reads the
    name of the tool, with the number of the call in the conversation.
    """
    if style == "kimi_k2":
        numbers = count(sum(len(_calls_of(message)) for message in messages))
        return lambda name: f"functions.{name}:{next(numbers)}"
    if style == "mistral":
        return lambda name: uuid.uuid4().hex[:9]
    return lambda name: f"chatcmpl-tool-{uuid.uuid4().hex}"


def _calls_of(message: Any) -> Sequence[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list) else ()


def _model_name(model: str) -> str:
    """Return the default name of a model: a folder by its last part, the hub's by their id."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _is_plain(text: str) -> bool:
    return text.isascii() and all(character.isalnum() or character in "._-" for character in text)
