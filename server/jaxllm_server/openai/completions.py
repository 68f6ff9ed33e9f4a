"""`/v1/completions`: a call per prompt. Pure."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2s
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.outputs import Logprob
from jaxllm_server.generation.answer_size import AnswerSize
from jaxllm_server.generation.calls import Call, Chunk, Part, PromptInfo, TokenUsage
from jaxllm_server.openai.replies import (
    finish_reason,
    finite,
    prompt_logprobs_of,
    reported,
    token_name,
    transfer_fields,
    usage_fields,
    usage_without,
)
from jaxllm_server.requests.fields import Body, flag, integer, prompts_of, text
from jaxllm_server.requests.form import Form, form_of
from jaxllm_server.requests.shared_fields import SHARED, UNBUILT, given, names_of, sampling_of, shared_call_fields
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.shared.repeated import Continued, Repeated

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_UNBUILT = {**UNBUILT, "prompt_embeds": ([],)}
_NO_PROMPT = (
    "Either prompt or prompt_embeds must be provided and non-empty: give a prompt, jaxllm has no prompt_embeds yet."
)
# null by default, as in vLLM: clients read these keys.
NOT_ASKED = ("prompt_logprobs", "prompt_token_ids", "token_ids")
_FIELDS = SHARED | _UNBUILT.keys() | {"prompt", "suffix", "echo", "best_of"}


class CompletionReply:
    """Reads a request of `/v1/completions` and builds its answer; choices are numbered prompt by prompt."""

    fields, unbuilt = _FIELDS, _UNBUILT
    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored: list[str] = []
        fields = given(body, _FIELDS, _UNBUILT, options.unknown_fields, self.ignored)
        if "prompt" not in fields and "prompt_embeds" in fields:
            raise UserError(_NO_PROMPT, "prompt")
        prompts = prompts_of(fields, "prompt", options.max_prompts)
        sampling = sampling_of(fields)
        if "logprobs" in fields:
            sampling["logprobs"] = fields["logprobs"]
        self.names: Mapping[str, str] = {"tokens": "prompt", **names_of(fields)}
        # Alone, logprob_token_ids reports listed and sampled tokens.
        self.form = form_of(fields, options, fields.get("logprobs", 0 if fields.get("logprob_token_ids") else None))
        self.is_stream = self.form.stream
        self._echoes_logprobs = bool(flag(fields, "echo", False)) and self.form.num_logprobs is not None
        if self._echoes_logprobs:
            sampling.setdefault("prompt_logprobs", self.form.num_logprobs)
            self.names = {**self.names, "prompt_logprobs": "logprobs"}
        self.echo_of = prompts if flag(fields, "echo", False) else []
        # echo with max_tokens 0 scores the prompt, as at OpenAI and vLLM.
        asked, least = fields.get("max_tokens"), fields.get("min_tokens")
        self._scores_prompt = bool(self.echo_of) and type(asked) is int and asked == 0 and not least
        if self._scores_prompt:
            del sampling["max_tokens"]
        self.prompt_texts: list[str] = []
        suffix = text(fields, "suffix") or None
        _check_together(fields, bool(self.echo_of), suffix is not None)
        self._num_outputs = _num_outputs(fields)
        num_candidates = _num_candidates(fields)
        self._chooses = num_candidates is not None
        if num_candidates is not None:
            sampling["n"] = num_candidates
            sampling.setdefault("logprobs", 0)  # to rank candidates
            self.names = {**self.names, "n": "best_of"}
        check_fan_out(sampling.get("n", 1), "best_of" if self._chooses else "n", len(prompts), options)
        if len(prompts) > 1 and fields.get("kv_transfer_params"):
            raise UserError("kv_transfer_params needs a single prompt.", "kv_transfer_params")
        own_id = text(fields, "request_id")
        self.request_id = request_id if own_id is None else own_id
        shared = shared_call_fields(fields)
        most = options.max_request_id_chars
        repeats = self._echoes_logprobs or self.form.shows_prompt_logprobs
        answer_size = AnswerSize(self._num_outputs if repeats else 1)
        self.calls: Sequence[Call] = [
            Call(
                answer_size=answer_size,
                prompt=prompt,
                suffix=suffix,
                sampling=sampling,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                scores_prompt=self._scores_prompt,
                request_id=self.request_id if len(prompts) == 1 else numbered(self.request_id, number, most),
                **shared,
            )
            for number, prompt in enumerate(prompts)
        ]
        self._usages: dict[int, TokenUsage] = {}
        self._prompts: dict[int, PromptInfo] = {}
        self._offsets: dict[int, Offset] = {}
        self._echoes: dict[int, tuple[Mapping[str, Repeated], Offset]] = {}
        self._shown: dict[int, Repeated] = {}

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        choices = [choice for number, chunk in enumerate(chunks) for choice in self._choices(number, chunk)]
        answer = {"choices": choices, "usage": usage_fields(self._usages.values(), self.form)}
        return answer | transfer_fields(chunks[0])

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        tails: list[dict[str, Any]] = []
        for choice in self._choices(number, chunk):
            tails.append({"choices": [choice]})
            if self.form.include_usage:
                is_told = self.form.continuous_usage
                tails[-1]["usage"] = usage_fields(self._usages.values(), self.form) if is_told else None
        if tails:
            tails[-1] |= transfer_fields(chunk)
        return tails

    def last_event(self) -> dict[str, Any] | None:
        if not self.form.include_usage:
            return None
        return {"choices": [], "usage": usage_fields(self._usages.values(), self.form)}

    def _choices(self, number: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield the choices of a call's chunk; set `_usages` for each to the tokens so far."""
        if self._chooses:
            chunk = replace(chunk, outputs=_best(chunk.outputs, self._num_outputs))
        chunk = _without_output(chunk) if self._scores_prompt else chunk
        self._usages[number] = chunk.usage
        if chunk.prompt is not None:
            self._prompts[number] = chunk.prompt
        for place, part in enumerate(chunk.outputs, 1):
            if self.form.continuous_usage:
                self._usages[number] = usage_without(chunk.usage, chunk.outputs[place:])
            index = number * self._num_outputs + part.index
            is_first = index not in self._offsets
            said = self.prompt_texts[number] if is_first and self.echo_of else ""
            offset = self._offsets.get(index) or Offset(len(said))
            if not (is_first and said) and not _says_something(part, self.form):
                continue
            prompt = self._prompts.get(number) if is_first else None
            if self._echoes_logprobs and prompt is not None and prompt.logprobs is not None:
                echoed, offset = self._echoed(number, prompt)
                own = columns_of(reported(part.logprobs, self.form) or (), offset, self.form) or {}
                logprobs: Any = {name: Continued(lists, own.get(name, ())) for name, lists in echoed.items()}
            else:
                logprobs = columns_of(reported(part.logprobs, self.form), offset, self.form)
            self._offsets[index] = offset
            choice: dict[str, Any] = {
                "index": index,
                "text": said + part.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(part),
            }
            if not self.form.stream:
                choice |= dict.fromkeys(NOT_ASKED)
            if part.finish_reason:
                choice["stop_reason"] = part.stop_reason
            if self.form.shows_prompt_logprobs and prompt is not None:
                if number not in self._shown:
                    self._shown[number] = Repeated(prompt_logprobs_of(prompt.logprobs) or ())
                choice["prompt_logprobs"] = None if prompt.logprobs is None else self._shown[number]
            if self.form.return_token_ids:
                choice["token_ids"] = list(part.token_ids)
                if prompt is not None:
                    choice["prompt_token_ids"] = list(prompt.token_ids)
            yield choice

    def _echoed(self, number: int, prompt: PromptInfo) -> tuple[Mapping[str, Repeated], Offset]:
        if number not in self._echoes:
            offset, first = Offset(0), Logprob(0.0, None, prompt.first_text, prompt.first_bytes)
            lists = columns_of(prompt.logprobs, offset, self.form, (prompt.token_ids[0], first)) or {}
            self._echoes[number] = {name: Repeated(values) for name, values in lists.items()}, offset
        lists, offset = self._echoes[number]
        return lists, offset.copy()


def numbered(request_id: str, number: int, most: int) -> str:
    """Append `-number` to a request id.

    Beyond `most` characters, a digest replaces the id's end; a longer id stays, to be refused.
    """
    numbered = f"{request_id}-{number}"
    if len(numbered) <= most or len(request_id) > most:
        return numbered
    ending = f"-{blake2s(request_id.encode(), digest_size=8).hexdigest()}-{number}"
    return f"{request_id[: max(0, most - len(ending))]}{ending}"


def _num_outputs(fields: Body) -> int:
    n = fields.get("n", 1)
    return n if type(n) is int else 1


def _num_candidates(fields: Body) -> int | None:
    """Return the candidates per prompt; None if they equal n or sampling is greedy."""
    if "best_of" not in fields:
        return None
    best_of, n = integer(fields, "best_of", 1), fields.get("n", 1)
    if best_of == n or type(n) is not int:
        return None
    if best_of < n:
        raise UserError(
            f"best_of must be greater than or equal to n, got n={n} and best_of={best_of}.", "best_of", best_of
        )
    if fields.get("temperature") == 0:
        return None
    for name, value in (("stream", fields.get("stream")), ("use_beam_search", fields.get("use_beam_search"))):
        if value is True:
            raise UserError(
                f"best_of selects among finished samples, which is not possible with {name}; remove one of them.",
                "best_of",
                best_of,
            )
    return best_of


def _best(parts: Sequence[Part], most: int) -> list[Part]:

    def mean(part: Part) -> float:
        entries = part.logprobs or ()
        return sum(finite(next(iter(entry.values()))) for entry in entries) / max(len(entries), 1)

    ranked = sorted(parts, key=mean, reverse=True)
    return [replace(part, index=index) for index, part in enumerate(ranked[:most])]


def check_fan_out(count: Any, name: str, num_prompts: int, options: ServerOptions) -> None:
    """Refuse too many sequences; other types are validated later."""
    most = options.most_sequences
    if name == "best_of" and count > options.max_n:
        raise UserError(f"best_of may be at most {options.max_n}, got {count}.", name)
    if num_prompts > 1 and isinstance(count, int) and count * num_prompts > most:
        message = f"{name} times the number of prompts may be at most {most}, got {count} times {num_prompts}."
        raise UserError(message, name)


def _check_together(fields: Body, has_echo: bool, has_suffix: bool) -> None:
    if has_echo and "truncate_prompt_tokens" in fields:
        raise UnsupportedError("echo with truncate_prompt_tokens is not supported by jaxllm yet.", "echo")
    for name, value in (("echo", has_echo), ("use_beam_search", fields.get("use_beam_search") is True)):
        if has_suffix and value:
            raise UnsupportedError(f"suffix with {name} is not supported by jaxllm.", "suffix")
    if has_suffix and "truncate_prompt_tokens" in fields:
        raise UnsupportedError("suffix with truncate_prompt_tokens is not supported by jaxllm yet.", "suffix")


def _without_output(chunk: Chunk) -> Chunk:
    """Remove the one generated token: the engine cannot run without output."""
    parts = [
        replace(
            part,
            text="",
            token_ids=(),
            logprobs=None if part.logprobs is None else [],
            finish_reason="length" if part.finish_reason == "stop" else part.finish_reason,
            stop_reason=None,
        )
        for part in chunk.outputs
    ]
    return replace(chunk, outputs=parts, usage=replace(chunk.usage, completion_tokens=0))


def _says_something(part: Part, form: Form) -> bool:
    return bool(
        not form.stream
        or part.text
        or part.finish_reason
        or part.logprobs
        or (form.return_token_ids and part.token_ids)
    )


class Offset:
    """The next token's character offset, without incomplete characters."""

    def __init__(self, start: int) -> None:
        self.characters = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def copy(self) -> Offset:
        copied = Offset(self.characters)
        copied._decoder.setstate(self._decoder.getstate())
        return copied

    def add(self, new: bytes) -> None:
        self.characters += len(self._decoder.decode(new))


def columns_of(
    entries: Sequence[dict[int, Logprob] | None] | None,
    offset: Offset,
    form: Form,
    first: tuple[int, Logprob] | None = None,
) -> dict[str, list[Any]] | None:
    """Return the columns of OpenAI's `logprobs`, an entry per token; advance `offset`.

    `first` is an echoed prompt's first token, which has no log-probability.
    """
    if entries is None or form.num_logprobs is None:
        return None
    offsets: list[int] = []
    names: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for candidates in entries:
        pair = next(iter(candidates.items())) if candidates else first
        if pair is None:
            continue
        token, entry = pair
        offsets.append(offset.characters)
        names.append(_name(token, entry, form))
        chosen.append(finite(entry) if candidates else None)
        tops.append(_named(candidates, form) if candidates else None)
        offset.add(entry.decoded_bytes)
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}


def _named(candidates: Mapping[int, Logprob], form: Form) -> dict[str, float]:
    """Return log-probabilities by token text, or by id if texts are equal."""
    named: dict[str, float] = {}
    for token, entry in candidates.items():
        name = _name(token, entry, form)
        named[name if name not in named else f"token_id:{token}"] = finite(entry)
    return named


def _name(token: int, entry: Logprob, form: Form) -> str:
    return token_name(token, entry, form, before_bytes="bytes:")
