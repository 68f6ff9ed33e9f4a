"""`/api/chat` and `/api/generate`: calls and lines of JSON, as in Ollama's docs/api.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.media.image_part import NamedPart, refuse_video
from jaxllm.sampling_fields import OLLAMA, names_in
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.generation.calls import Call, Chunk, Part, Timing
from jaxllm_server.ollama.models import model_name, moment
from jaxllm_server.openai.conversation import conversation_of
from jaxllm_server.requests.fields import Body, flag, mapping, text
from jaxllm_server.requests.shared_fields import given
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.error_table import message_of
from jaxllm_server.shared.options import ServerOptions

PATHS = tuple(f"/api/{name}" for name in ("chat", "generate", "embed", "tags", "show", "ps", "version"))
_SAMPLING = names_in(SamplingParams, OLLAMA)
# Of loading and memory, and samplers of llama.cpp.
_IDLE_OPTIONS = frozenset(
    (
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
        *("num_gqa", "rope_frequency_base", "rope_frequency_scale", "use_mmap", "use_mlock", "embedding_only"),
        *("logits_all", "vocab_only", "penalize_newline", "repeat_last_n"),
        *("tfs_z", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "draft_num_predict"),
    )
)
_SHARED = frozenset({"model", "stream", "options", "format", "think", "keep_alive", "truncate", "shift"})
_UNBUILT: Mapping[str, tuple[Any, ...]] = {"logprobs": (False,), "top_logprobs": (0,)}
_UNBUILT_OF_GENERATE = {**_UNBUILT, "suffix": ("",), "template": ("",), "context": ([],)}


class _Reply:
    """A body's calls and the conversion of their chunks."""

    id_prefix = ""
    ignored: list[str]
    names: Mapping[str, str] = {parameter: name for name, parameter in _SAMPLING.items()} | {
        "structured_outputs": "format",
        "chat_template_kwargs": "think",
    }

    def __init__(self, fields: Body, options: ServerOptions, request_id: str, **prompt: Any) -> None:
        self.request_id = request_id
        self.is_stream = bool(flag(fields, "stream", True))
        self._max_depth = options.max_json_depth
        self.calls: Sequence[Call] = [
            Call(
                model=model_name(fields),
                sampling=_sampling_of(fields, options.unknown_fields, self.ignored),
                template_kwargs=_thinking_of(fields.get("think")),
                stream=self.is_stream,
                request_id=request_id,
                may_fill_context=True,
                **prompt,
            )
        ]
        self._head: dict[str, Any] = {}
        self._tools: dict[int, tuple[str, list[str]]] = {}
        self._last: Chunk

    def begin(self, head: Mapping[str, Any]) -> None:
        self._head = {"model": head["model"], "created_at": moment(head["created"])}

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        (self._last,) = chunks
        (part,) = self._last.outputs
        self._collect(part)
        return self._line(part.text, part.reasoning, self._tool_calls()) | self._ending(self._last)

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        self._last = chunk
        lines = []
        for part in chunk.outputs:
            self._collect(part)
            if part.text or part.reasoning:
                lines.append(self._line(part.text, part.reasoning))
        return lines

    def last_events(self) -> list[dict[str, Any]]:
        calls = self._tool_calls()
        return [*([self._line("", "", calls)] if calls else []), self._line("", "") | self._ending(self._last)]

    def failure(self, error: Exception) -> list[dict[str, Any]]:
        return [{"error": message_of(error)}]

    def _collect(self, part: Part) -> None:
        for call in part.tool_calls:
            self._tools.setdefault(call.index, (call.name or "", []))[1].append(call.arguments)

    def _tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls in Ollama's form, except truncated ones."""
        given = [(name, "".join(texts).strip() or "{}") for name, texts in self._tools.values()]
        read = [(name, strict_json.object_of(arguments, self._max_depth)) for name, arguments in given]
        return [{"function": {"name": name, "arguments": each}} for name, each in read if each is not None]

    def _line(self, content: str, thinking: str, calls: Sequence[Any] = ()) -> dict[str, Any]:
        shown: dict[str, Any] = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {**self._head, "message": {"role": "assistant", "content": content, **shown}, "done": False}

    def _ending(self, chunk: Chunk) -> dict[str, Any]:
        usage, timing = chunk.usage, chunk.timing or Timing(0.0, 0.0, 0.0, 0.0)
        was_cut = any(part.finish_reason in ("length", "context", "time_limit") for part in chunk.outputs)
        seconds = {"total": timing.total, "load": 0, "prompt_eval": timing.prefill}
        seconds["eval"] = timing.total - timing.first_token
        return {
            **{"done": True, "done_reason": "length" if was_cut else "stop"},
            **{"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens},
            **{f"{name}_duration": round(1e9 * value) for name, value in seconds.items()},
        }


class OllamaChatReply(_Reply):
    """The reply of `/api/chat`."""

    fields = _SHARED | _UNBUILT.keys() | {"messages", "tools"}
    unbuilt = _UNBUILT

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored = []
        fields = given(body, self.fields, self.unbuilt, options.unknown_fields, self.ignored)
        prompt = conversation_of({"messages": fields.get("messages"), "tools": fields.get("tools") or None})
        messages = [_message_in(message, index) for index, message in enumerate(prompt["messages"])]
        super().__init__(fields, options, request_id, messages=messages, tools=prompt["tools"])


class OllamaGenerateReply(_Reply):
    """The reply of `/api/generate`; unless `raw`, the prompt is a user message."""

    fields = _SHARED | _UNBUILT_OF_GENERATE.keys() | {"prompt", "system", "raw", "images"}
    unbuilt = _UNBUILT_OF_GENERATE
    names: Mapping[str, str] = {**_Reply.names, "messages": "prompt"}

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored = []
        _refuse_videos(body, "", "videos")
        fields = given(body, self.fields, self.unbuilt, options.unknown_fields, self.ignored)
        prompt, system = text(fields, "prompt"), text(fields, "system")
        if not prompt:
            raise UserError("prompt is missing: the model is loaded already, and there is nothing to answer.", "prompt")
        if flag(fields, "raw", False):
            if fields.get("images"):
                raise UserError("images need a chat template: leave raw out.", "images")
            super().__init__(fields, options, request_id, prompt=prompt)
            return
        messages = [{"role": "system", "content": system}] if system else []
        user = _message_in({"role": "user", "content": prompt, "images": fields.get("images")}, 0, "images")
        super().__init__(fields, options, request_id, messages=[*messages, user])

    def _line(self, content: str, thinking: str, calls: Sequence[Any] = ()) -> dict[str, Any]:
        shown = {"thinking": thinking} if thinking else {}
        return {**self._head, "response": content, **shown, "done": False}


def _message_in(message: Mapping[str, Any], index: int, parameter: str = "messages") -> dict[str, Any]:
    _refuse_videos(message, f"messages[{index}].", parameter)
    content = message.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        refuse_video(kind, f"messages[{index}].content[{at}]", parameter)
    renamed = {"thinking": "reasoning_content", "tool_name": "name"}
    own = {renamed.get(name) or name: value for name, value in message.items() if name != "images"}
    images = message.get("images")
    if not images:
        return own
    name = parameter if parameter == "images" else f"messages[{index}].images"
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UserError(f"{name} must be a list of images in base64.", parameter)
    parts = [
        NamedPart(f"{name}[{at}]", type="image_url", image_url=f"data:image/any;base64,{image}")
        for at, image in enumerate(images)
    ]
    return own | {"content": [*parts, {"type": "text", "text": own.get("content") or ""}]}


def _refuse_videos(fields: Mapping[str, Any], path: str, parameter: str) -> None:
    for name, value in fields.items():
        if value:
            refuse_video(name, f"{path}{name}", parameter)


def _thinking_of(think: Any) -> dict[str, Any]:
    if not isinstance(think, bool | str | None):
        raise UserError("think must be true, false, low, medium or high.", "think")
    if think is None:
        return {}
    kwargs: dict[str, Any] = {"enable_thinking": think is not False, "thinking": think is not False}
    return kwargs | ({"reasoning_effort": think} if isinstance(think, str) else {})


def _sampling_of(fields: Body, policy: str, ignored: list[str]) -> dict[str, Any]:
    asked = given(mapping(fields, "options") or {}, _SAMPLING.keys() | _IDLE_OPTIONS, {}, policy, ignored)
    sampling = {_SAMPLING[name]: value for name, value in asked.items() if name in _SAMPLING}
    most = sampling.get("max_tokens")
    if isinstance(most, int) and most < 0:  # fill the context
        del sampling["max_tokens"]
    form = fields.get("format")
    if form not in (None, "", "json") and not isinstance(form, dict):
        raise UserError('format must be "json" or a JSON schema.', "format")
    if form:
        sampling["structured_outputs"] = {"json_object": True} if form == "json" else {"json": form}
    return sampling
