"""Splits what an engine puts out for a request into reasoning, content and tool calls: chunks that say what is new.

Knows the forms in which a model writes. Knows no request's shape and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jaxllm.outputs import RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.parsers.forced_calls import NamedCall
from jaxllm_server.parsers.harmony import AnalysisTokens
from jaxllm_server.parsers.reasoning import ReasoningParser, ReasoningTokens
from jaxllm_server.parsers.table import ReasoningForm
from jaxllm_server.parsers.tool_parsers import ToolCallDelta, ToolParser
from jaxllm_server.shared.calls import Call, Chunk, Finish, Part, PromptInfo, Timing, Usage

CallReader: TypeAlias = ToolParser | NamedCall


class OutputReader:
    """Turns one request's outputs into chunks."""

    def __init__(
        self,
        call: Call,
        params: SamplingParams,
        tokenizer: Tokenizer,
        tool_parser: Callable[[], CallReader] | None,
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
        tools: CallReader | None,
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
