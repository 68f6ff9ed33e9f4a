"""Every entry point for hostile bytes: a name, a function of the bytes, and seeds.

A target returns or raises a `UserError`, in bounded time; anything else is a defect. Targets that check more, such as
agreement of interfaces, raise an AssertionError.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import MOST_MESSAGE, UserError
from jaxllm.v1 import inference_pb2, types_pb2
from jaxllm_server.shared import strict_json
from tests.fuzz import files, media, texts, videos
from tests.fuzz.doors import MOST_DEPTH, doors
from tests.fuzz.fields import BASE, NAMES, VALUES

ROUTES = ("completions", "chat", "tokenize", "detokenize")
MESSAGES = (inference_pb2.GenerateRequest, inference_pb2.TokenizeRequest, inference_pb2.DetokenizeRequest)


@dataclass(frozen=True)
class Target:
    """One entry point."""

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    most_memory: int = 64 << 20  # bytes that one input may take

    def check(self, data: bytes) -> bool:
        """Return whether the bytes were accepted; a refusal is one line that clients and logs may show."""
        try:
            self.run(data)
        except UserError as error:
            said = str(error)
            assert said and said.isprintable() and len(said) <= MOST_MESSAGE, said
            return False
        return True


def _http(data: bytes) -> None:
    refusals = []
    for route in ROUTES:
        try:
            doors().http(route, data)
        except UserError as error:
            refusals.append(error)
    if len(refusals) == len(ROUTES):
        raise refusals[0]


def _grpc(data: bytes) -> None:
    refusals = []
    for kind in MESSAGES:
        for stream in (False, True):
            try:
                doors().grpc(kind, data, stream)
            except UserError as error:
                refusals.append(error)
    if len(refusals) == 2 * len(MESSAGES):
        raise refusals[0]


def _verdicts(data: bytes) -> None:
    """Check that a JSON object of fields gets the same verdict through all interfaces, without interface-specific
    fields.
    """
    document = strict_json.read(data, MOST_DEPTH)
    fields = {"prompt": "a", **{name: value for name, value in document.items() if name in NAMES and value is not None}}
    prompt, bias = fields["prompt"], fields.get("logit_bias")
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        return  # several prompts, which only HTTP supports
    if isinstance(bias, dict):  # JSON's keys are text
        fields["logit_bias"] = {int(key) if re.fullmatch("-?[0-9]{1,9}", key) else key: bias[key] for key in bias}
    check_verdicts(fields)


def check_verdicts(fields: dict[str, Any]) -> str | None:
    """Compare the verdicts on fields; if several are wrong, each interface may name another of them."""
    python, http, grpc = doors().python_verdict(fields), doors().http_verdict(fields), doors().grpc_verdict(fields)
    accepted = [verdict == "accepted" for verdict in (python, http, grpc)]
    # Limits of servers only: numbers of items, and room for the requested tokens.
    assert accepted[1] == accepted[2] and accepted[0] >= accepted[1], (fields, python, http, grpc)
    if accepted[0] and not accepted[1]:
        assert http in ("n", "stop", "stop_token_ids", "cache_salt", "max_tokens", "prompt"), (fields, http)
    return python


def _conversation(data: bytes) -> None:
    document = strict_json.read(b'{"messages": ' + data + b"}", MOST_DEPTH)
    texts.check_conversation(texts.must_be_messages(document["messages"]))


def _stream(data: bytes) -> None:
    """Parse bytes as: tokenizer, whether special tokens are skipped, step sizes, prompt length, ids."""
    head, ids = data[:4].ljust(4, b"\0"), data[4:512]
    kind = texts.TOKENIZERS[head[0] % len(texts.TOKENIZERS)]
    count = texts.tokenizer_of(kind).vocab_size + 3
    tokens = [(high << 8 | low) % count for high, low in zip(ids[::2], ids[1::2], strict=False)]
    sizes = random.Random(head[2])
    cut = head[3] % (len(tokens) + 1)
    texts.check_stream(kind, tokens[:cut], tokens[cut:], bool(head[1] & 1), iter(lambda: sizes.randrange(1, 5), 0))


def _stop(data: bytes) -> None:
    """Parse bytes as: flags, number of prompt tokens, min_tokens, a text, then stop strings, one per line."""
    head, (ids, _, lines) = data[:3].ljust(3, b"\0"), data[3:].partition(b"\n")
    text = ids.decode(errors="replace")[:200]
    tokenizer = texts.tokenizer_of("embedded")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stops = [line[:64] for line in lines.decode(errors="ignore").split("\n") if line][:4]
    given = {"stop": stops, "include_stop_str_in_output": bool(head[0] & 1), "min_tokens": head[2] % 4}
    given |= {"skip_special_tokens": bool(head[0] & 2), "max_tokens": 1000}
    cut = head[1] % (len(tokens) + 1)
    texts.check_sample("embedded", tokens[:cut], tokens[cut:], given)


def _parsers(data: bytes) -> None:
    texts.check_parsers(data[1:2000].decode(errors="replace"), random.Random(data[:1]))


def _bodies() -> list[bytes]:
    bodies: list[Any] = [
        {**BASE, "echo": True, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [[5, 6], [7]], "n": 2, "logit_bias": {"5": 1.5}, "vllm_xargs": {"no_change": [1, 2]}},
        {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2, "logprobs": True, "max_tokens": 3},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "tool", "content": "x"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        },
        {"prompt": "Once", "structured_outputs": {"regex": "a+", "whitespace_pattern": " ?"}, "max_tokens": 3},
        {"prompt": "Once", "guided_choice": ["a", "b"], "response_format": {"type": "text"}, "max_tokens": 3},
        {"tokens": [5, 6, 7], "model": ""},
        {"prompt": "Once", "add_special_tokens": False, "return_token_strs": True},
    ]
    return [json.dumps(body).encode() for body in bodies]


def _messages() -> list[bytes]:
    generate = inference_pb2.GenerateRequest(text="Once", request_id="a", cache_salt="b", add_special_tokens=True)
    generate.sampling.temperature, generate.sampling.n, generate.stop.max_tokens = 0.5, 2, 4
    generate.sampling.logit_bias[5] = 1.5
    generate.stop.stop_strings.append("x")
    generate.stop.time_limit.seconds = 3
    generate.output.logprobs = 2
    generate.structured_output.json_schema = '{"type": "object"}'
    chat = inference_pb2.GenerateRequest()
    message = types_pb2.ChatMessage(role="user", content="Hi", name="n")
    message.tool_calls.add(id="1", name="f", arguments_json='{"a": 1}')
    chat.chat.messages.append(message)
    chat.chat.tools_json = '[{"type": "function", "function": {"name": "f"}}]'
    chat.chat.template_kwargs.update({"a": 1, "b": True})
    chat.chat.tool_choice, chat.chat.required_tool = types_pb2.TOOL_CHOICE_REQUIRED, "f"
    ids = inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5, 6]))
    asked = [inference_pb2.TokenizeRequest(text="Once"), inference_pb2.DetokenizeRequest(token_ids=[5, 6])]
    return [each.SerializeToString() for each in (generate, chat, ids, *asked)]


def _field_sets() -> list[bytes]:
    chance = random.Random(7)
    sets = [{name: chance.choice(VALUES[name]) for name in chance.sample(NAMES, 4)} for _ in range(20)]
    return [json.dumps({**BASE, **each}).encode() for each in sets]


def _streams() -> list[bytes]:
    chance = random.Random(8)
    return [bytes([kind, kind & 1, 3, 2]) + chance.randbytes(40) for kind in range(len(texts.TOKENIZERS))]


def _stops() -> list[bytes]:
    return [
        b"\1\2\0Once upon a time\nupon\non a\n",
        "\0\0\2naïve 日本語 🎉👩‍👩‍👧 x\n🎉\n本\n".encode(),
        b"\3\1\1a<|im_end|>b\nim_\n<|im_end|>\n",
    ]


def _model_texts() -> list[bytes]:
    return [
        b'\0a <tool_call>{"name": "f", "arguments": {"a": "}\\"</tool_call>"}}</tool_call> b',
        b'\1{"name": "f", "parameters": {"a": [1, 2]}};{"name": "g", "parameters": {}}',
        b"\2\n<think>\nso </thin\n</think>\n\nyes <think></think>",
        b"\3<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        b'\4[f(a="b", c=[1, True]), g()]',
        b'\5[TOOL_CALLS]f[ARGS]{"a": 1}<|channel|>analysis<|message|>a<|end|><|channel|>x to=f<|message|>{}<|call|>',
    ]


TARGETS = {
    target.name: target
    for target in (
        Target("http", _http, _bodies),
        Target("grpc", _grpc, _messages),
        Target("verdicts", _verdicts, _field_sets),
        Target("conversation", _conversation, texts.hostile_conversations),
        Target("stream", _stream, _streams),
        Target("stop", _stop, _stops),
        Target("parsers", _parsers, _model_texts),
        Target("image", media.take_image, media.images, media.MOST_MEMORY),
        Target("sound", media.take_sound, media.sounds),
        Target("video", videos.take_video, videos.videos, media.MOST_MEMORY),
        Target("safetensors", files.of_file("model.safetensors", files.read_safetensors), files.safetensors_files),
        Target(
            "adapter_config", files.of_file("adapter_config.json", files.read_adapter_folder), files.adapter_configs
        ),
        Target("adapter", files.of_file("adapter_model.safetensors", files.read_adapter_folder), files.adapter_files),
        Target("index", files.of_file("model.safetensors.index.json", files.read_index), files.indexes),
        Target("config", files.of_file("config.json", files.read_model), files.configs),
        Target("modules", files.of_file("modules.json", files.read_modules), files.modules),
        Target("generation", files.of_file("generation_config.json", files.read_generation), files.generation_configs),
        Target("tokenizer", files.of_file("tokenizer.json", files.read_tokenizer), files.tokenizers),
        Target("replay", files.of_file("recording", files.read_recording), files.recordings),
        Target(
            "tokenizer_config", files.of_file("tokenizer_config.json", files.read_tokenizer), files.tokenizer_configs
        ),
    )
}
