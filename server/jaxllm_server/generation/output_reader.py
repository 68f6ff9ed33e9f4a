"""Splits outputs into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jaxllm.outputs import RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.generation.calls import Call, Chunk, Finish, Part, PromptInfo, Timing, TokenUsage
from jaxllm_server.parsers.forced_calls import NamedCall
from jaxllm_server.parsers.harmony import AnalysisTokens
from jaxllm_server.parsers.reasoning import ReasoningParser, ReasoningTokens
from jaxllm_server.parsers.table import ReasoningForm
from jaxllm_server.parsers.tool_parsers import ToolCallDelta, ToolParser

CallReader: TypeAlias = ToolParser | NamedCall


class OutputReader:
    """Converts a request's outputs to chunks."""

    def __init__(
        self,
        call: Call,
        params: SamplingParams,
        tokenizer: Tokenizer,
        tool_parsers: Callable[[], tuple[CallReader, ToolParser | None]] | None,
        reasoning: ReasoningForm | None,
        prompt: str,
        is_switched_off: bool,
    ) -> None:
        self._call = call
        self._params = params
        self._tokenizer = tokenizer
        self._tool_parsers = tool_parsers
        self._reasoning = None if reasoning is None else reasoning.form
        self._prompt = prompt
        self.may_reason = self._reasoning is not None and self._reasoning.may_reason(prompt, is_switched_off)
        self._usage = TokenUsage()
        self._is_first = True
        self._splitters: dict[int, Splitter] = {}
        self._num_tokens: dict[int, int] = {}
        self.shows_markers = any(tokenizer.is_special(marker) for marker in self._make_splitter().markers)

    def read(self, output: RequestOutput) -> Chunk:
        usage = self._usage
        usage.prompt_tokens = len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids or ())
        usage.cached_prompt_tokens = output.num_cached_tokens or 0
        parts = []
        for completion in output.outputs:
            index = completion.index
            usage.completion_tokens += len(completion.token_ids)
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(completion.token_ids)
            if index not in self._splitters:
                self._splitters[index] = self._make_splitter()
            splitter = self._splitters[index]
            text, reasoning, calls = splitter.push(completion.text, completion.finish_reason)
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
                    weight_versions=completion.weight_versions,
                )
            )
        prompt = None
        if self._is_first:
            ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
            prompt = PromptInfo(ids, usage.cached_prompt_tokens, logprobs)
            if logprobs is not None:
                first_text, first_bytes = self._tokenizer.token_text(ids[0]), self._tokenizer.raw_bytes(ids[0])
                prompt = replace(prompt, first_text=first_text, first_bytes=first_bytes)
        self._is_first = False
        return Chunk(
            request_id=output.request_id,
            outputs=parts,
            prompt=prompt,
            usage=replace(usage),
            timing=_timing(output.metrics) if output.finished and output.metrics else None,
            is_last=output.finished,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _finish_reason(self, reason: str | None, index: int, num_calls: int) -> Finish | None:
        if reason == "length":
            most = self._params.max_tokens
            return "length" if most is not None and self._num_tokens[index] >= most else "context"
        if reason == "stop" and num_calls:
            return "tool_calls"
        return reason  # pyright: ignore[reportReturnType] - the engine raises "error"

    def _make_splitter(self) -> Splitter:
        tools = (None, None) if self._tool_parsers is None else self._tool_parsers()
        form = self._reasoning
        if form is None:
            return Splitter(None, *tools, None)
        return Splitter(form.parser(self._prompt), *tools, form.counter(self._tokenizer.token_id))


class Splitter:
    """Splits text into content, reasoning and tool calls."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: CallReader | None,
        early_tools: ToolParser | None,
        tokens: ReasoningTokens | AnalysisTokens | None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._early_tools = early_tools if reasoning is not None and reasoning.may_hold_calls else None
        self._tokens = tokens
        self.num_calls = 0
        self._num_early = 0
        self.markers = (*(reasoning.markers if reasoning else ()), *(tools.markers if tools else ()))

    def push(self, text: str, finish_reason: str | None) -> tuple[str, str, list[ToolCallDelta]]:
        """Return final content, reasoning and call deltas."""
        content, reasoning = text, ""
        is_last, is_cut_off = finish_reason is not None, finish_reason not in (None, "stop")
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(text)
            if is_last:
                last = self._reasoning.finish(is_cut_off)
                reasoning, content = reasoning + last[0], content + last[1]
        calls: list[ToolCallDelta] = []
        if self._early_tools is not None:
            is_over = is_last or bool(content)
            reasoning, calls = _read(self._early_tools, reasoning, is_over, is_cut_off and not content)
            self._num_early += sum(call.name is not None for call in calls)
            self._early_tools = None if is_over else self._early_tools
        if self._tools is not None:
            content, own = _read(self._tools, content, is_last, is_cut_off)
            calls += [replace(call, index=call.index + self._num_early) for call in own] if self._num_early else own
        self.num_calls += sum(call.name is not None for call in calls)
        return content, reasoning, calls

    def count_reasoning(self, ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens in `ids`, whose text was pushed."""
        if self._tokens is None or self._reasoning is None:
            return 0
        return self._tokens.count(ids, self._reasoning.is_reasoning)


def _read(parser: CallReader, text: str, is_over: bool, is_cut_off: bool) -> tuple[str, list[ToolCallDelta]]:
    rest, calls = parser.push(text)
    if is_over:
        last, last_calls = parser.finish(is_cut_off)
        return rest + last, calls + last_calls
    return rest, calls


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
