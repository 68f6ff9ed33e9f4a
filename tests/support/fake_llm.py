"""A fake `LLM` for tests of the command line."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxllm.commands import cli
from jaxllm.errors import EngineError, UserError
from jaxllm.lora_request import LoRARequest
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams


class FakeEngine:
    """Echoes the end of each prompt, one word per step; "^C" in it raises KeyboardInterrupt."""

    def __init__(self, max_model_len: int) -> None:
        self.model = SimpleNamespace(max_model_len=max_model_len, processor=None)
        self.aborted: list[str] = []
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.adapters: list[LoRARequest | None] = []  # of requests and rendered conversations
        self._words: list[str] = []
        self._text = ""

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None = None
    ) -> None:
        self.adapters.append(lora_request)
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        if text == "too long":
            raise UserError("The prompt is too long.", "prompt")
        self.seen.append((prompt, params))
        self._words, self._text = text.split("|")[-1].split(" ")[: params.max_tokens], ""

    def has_unfinished_requests(self) -> bool:
        return bool(self._words)

    def step(self) -> list[RequestOutput]:
        word = self._words.pop(0)
        if word == "^C":
            signal.raise_signal(signal.SIGINT)
            word = "…"
        self._text += f"{word} "
        return [output_of("cli", "", self._text, not self._words, "length" if word == "cut" else "stop")]

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._words = []


def output_of(request_id: str, prompt: Any, text: str, is_finished: bool, reason: str = "stop") -> RequestOutput:
    is_text = isinstance(prompt, str)
    completion = CompletionOutput(0, text, text.split(), finish_reason=reason if is_finished else None)  # type: ignore[arg-type]
    ids = list(range(len(prompt.split()))) if is_text else prompt
    return RequestOutput(request_id, prompt if is_text else None, ids, [completion], is_finished)


class FakeLLM:
    """The part of `LLM` that the command line uses."""

    made: FakeLLM
    default = SamplingParams(temperature=0.7)
    max_model_len = 100

    def __init__(self, model: str | None = None, *, use_tqdm: bool = False, **settings: Any) -> None:
        if model == "wide":
            raise UserError(
                "tensor_parallel_size is 2 but JAX sees 1 device(s); use at most 1.", "tensor_parallel_size"
            )
        if model == "broken":
            raise EngineError("the device\nis gone")
        if model == "odd":
            raise KeyError("weights")
        if model == "slow":
            raise KeyboardInterrupt
        FakeLLM.made = self
        self.model, self.settings, self.engine = model, settings, FakeEngine(self.max_model_len)
        self.is_closed = False

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default

    def generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        self.engine.adapters.append(lora_request)
        self.engine.seen += list(zip(prompts, params, strict=True))
        return [output_of(str(index), prompt, f"<{prompt}>", True) for index, prompt in enumerate(prompts)]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, str]], lora_request: LoRARequest | None = None
    ) -> dict[str, Any]:
        self.engine.adapters.append(lora_request)
        if self.model == "base":
            raise UserError("base has no chat template; use generate().", "chat_template")
        text = "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)
        return {"prompt": text, "prompt_token_ids": list(range(len(text)))}


Run = Callable[..., tuple[int, str, str]]


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls main() with the fake, and returns exit code, stdout and stderr."""
    module = ModuleType("jaxllm.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxllm.llm", module)
    monkeypatch.setattr(FakeLLM, "max_model_len", 100)

    def call(*arguments: str, stdin: str | bytes = "", at_terminal: bool = False) -> tuple[int, str, str]:
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        stream = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
        stream.isatty = lambda: at_terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: at_terminal)
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def seen_params() -> list[SamplingParams]:
    """Return the parameters passed to the newest fake."""
    return [params for _, params in FakeLLM.made.engine.seen]
