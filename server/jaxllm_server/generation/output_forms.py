"""Formats of tool calls and reasoning, configured or detected."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

from jaxllm.engine.engine_client import EngineClient
from jaxllm.errors import FeatureDisabledError, UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.generation.call_grammars import Calls, grammar_of, headers_of
from jaxllm_server.generation.calls import Call, NamedTool, is_forced
from jaxllm_server.generation.output_reader import CallReader, OutputReader
from jaxllm_server.parsers import table
from jaxllm_server.parsers.forced_calls import NamedCall, RequiredCalls
from jaxllm_server.parsers.harmony import CHANNEL, FINAL
from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, ReasoningForm, ToolForm
from jaxllm_server.parsers.tool_parsers import MakeId, ToolParser
from jaxllm_server.shared.options import ServerOptions

_log = logging.getLogger("jaxllm.server")


class OutputForms:
    """A model's formats; may be created before the engine has loaded.

    `template` is the operator's.
    """

    def __init__(
        self, engine: EngineClient, options: ServerOptions, template: str | None, template_kwargs: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._options = options
        self._template = template
        self._template_kwargs = template_kwargs
        table.check_name("tool_call_parser", options.tool_call_parser, TOOL_PARSERS)
        table.check_name("reasoning_parser", options.reasoning_parser, REASONING_PARSERS)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """The loaded model's tool-call format, None if disabled; UserError if "auto" matches none."""
        name = self._form_name("tool_call_parser", TOOL_PARSERS)
        return None if name is None else TOOL_PARSERS[name]

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """The model's reasoning format, as `tool_form`."""
        name = self._form_name("reasoning_parser", REASONING_PARSERS)
        return None if name is None else REASONING_PARSERS[name]

    def choose(self) -> None:
        _ = self.tool_form, self.reasoning_form

    def _form_name(self, parameter: str, forms: Mapping[str, ToolForm] | Mapping[str, ReasoningForm]) -> str | None:
        name = getattr(self._options, parameter)
        if name != table.AUTO:
            return name
        templates = self._engine.model.tokenizer.chat_templates
        template = self._template or templates.get("tool_use") or templates.get("default") or ""
        chosen = table.form_of(template, forms)
        if chosen is None:
            message = (
                f"{parameter}=auto: no parser matches the model's chat template; choose one of {', '.join(forms)}."
            )
            raise UserError(message, parameter)
        _log.info("%s: %s, by the chat template", parameter, chosen)
        return chosen

    def check(self, call: Call, params: SamplingParams) -> None:
        """Refuse tools without a parser, unless calls are forced, and tools without text."""
        has_tools = _has_tools(call)
        if has_tools and self._options.tool_call_parser is None and not is_forced(call.tool_choice):
            raise FeatureDisabledError(
                "This server was started without --tool-call-parser, so it cannot answer with tool calls.", "tools"
            )
        if has_tools and not params.detokenize:
            raise UserError("Tool calls are read from the text: leave detokenize on.", "detokenize")

    def reader(self, call: Call, params: SamplingParams, prompt: str, tokenizer: Tokenizer) -> OutputReader:
        return OutputReader(
            call,
            params,
            tokenizer,
            self._tool_parsers(call),
            self.reasoning_form if call.messages is not None else None,
            prompt,
            _is_switched_off({**self._template_kwargs, **call.template_kwargs}),
        )

    def constraint(
        self, call: Call, asked: StructuredOutputsParams, prompt: str, may_reason: bool, tokenizer: Tokenizer
    ) -> StructuredOutputsParams:
        """Extend a constraint on the answer to the whole output, with reasoning, or calls instead."""
        reasoning = None if self.reasoning_form is None or not may_reason else self.reasoning_form.form
        if reasoning is not None:
            after, openings = reasoning.begin_after(is_forced(call.tool_choice)), reasoning.openings(prompt)
            asked = replace(asked, begin_after=after, may_open_with=openings)
        form = self.tool_form
        if form is None or not _has_tools(call) or is_forced(call.tool_choice):
            return asked
        calls = Calls(
            call.tools or (),
            call.takes_one_call,
            lambda text: tokenizer.token_id(text) if tokenizer.is_special(text) else None,
        )
        headers = headers_of(form.parser, calls, () if reasoning is None else reasoning.kept_ends)
        if headers and asked.begin_after is None:
            asked = replace(asked, begin_after=FINAL, may_open_with=(CHANNEL,))
        return replace(asked, or_grammar=grammar_of(form.parser, calls), or_grammar_after=headers)

    def _tool_parsers(self, call: Call) -> Callable[[], tuple[CallReader, ToolParser | None]] | None:
        form = self.tool_form
        style = "" if form is None else form.ids
        num_before = sum(len(_calls_of(message)) for message in call.messages or ()) if style == "kimi_k2" else 0
        make_id = partial(_id_maker, style, num_before)
        if isinstance(call.tool_choice, NamedTool):
            name = call.tool_choice.name
            return lambda: (NamedCall(make_id(), name), None)
        if call.tool_choice == "required":
            return lambda: (RequiredCalls(make_id()), None)
        if form is None or not _has_tools(call):
            return None
        tools = call.tools or ()

        def parsers() -> tuple[CallReader, ToolParser]:
            of_output = make_id()
            return form.parser(of_output, tools), form.parser(of_output, tools)

        return parsers


def _has_tools(call: Call) -> bool:
    return bool(call.tools) and call.tool_choice != "none"


def _is_switched_off(template_kwargs: Mapping[str, Any]) -> bool:
    is_named = any(template_kwargs.get(name) is False for name in ("enable_thinking", "thinking"))
    return is_named or template_kwargs.get("reasoning_effort") == "none"


def _id_maker(style: str, num_before: int) -> MakeId:
    """Return a generator of call ids.

    Mistral's templates require nine letters and digits. Kimi's render the id as the tool's name, with the call's index.
    """
    if style == "kimi_k2":
        numbers = count(num_before)
        return lambda name: f"functions.{name}:{next(numbers)}"
    if style == "mistral":
        return lambda name: uuid.uuid4().hex[:9]
    return lambda name: f"chatcmpl-tool-{uuid.uuid4().hex}"


def _calls_of(message: Any) -> Sequence[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list) else ()
