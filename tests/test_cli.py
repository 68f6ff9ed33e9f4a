"""The command line: what it reads, writes and returns, with a stand-in for the engine; at the end with the real one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxllm import cli, flags
from jaxllm.commands.chat import CHAT_HELP
from jaxllm.config import EngineConfig
from jaxllm.errors import EngineError, UserError
from jaxllm.types import CompletionOutput, RequestOutput, SamplingParams
from tests.sizes import FEW_SLOTS

ROOT = Path(__file__).parents[1]


class FakeEngine:
    """Answers any prompt with its own last words, a word a step; "^C" among them is the user's ^C."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.aborted: list[str] = []
        self.seen: list[tuple[Any, SamplingParams]] = []
        self._words: list[str] = []
        self._text = ""

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
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
        return [_output("cli", "", self._text, not self._words, "length" if word == "cut" else "stop")]

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._words = []


def _output(request_id: str, prompt: Any, text: str, is_finished: bool, reason: str = "stop") -> RequestOutput:
    is_text = isinstance(prompt, str)
    completion = CompletionOutput(0, text, text.split(), finish_reason=reason if is_finished else None)  # type: ignore[arg-type]
    ids = list(range(len(prompt.split()))) if is_text else prompt
    return RequestOutput(request_id, prompt if is_text else None, ids, [completion], is_finished)


class FakeLLM:
    """What of `LLM` the command line uses."""

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

    def generate(self, prompts: Sequence[Any], params: Sequence[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        self.engine.seen += list(zip(prompts, params, strict=True))
        return [_output(str(index), prompt, f"<{prompt}>", True) for index, prompt in enumerate(prompts)]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        if self.model == "base":
            raise UserError("base has no chat template; use generate().", "chat_template")
        text = "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)
        return {"prompt": text, "prompt_token_ids": list(range(len(text)))}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call main() with the stand-in; give the exit code, standard output and standard error."""
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


def _params() -> list[SamplingParams]:
    return [params for _, params in FakeLLM.made.engine.seen]


# ---- flags


def test_every_field_is_a_flag_that_reaches_its_place(run: Run) -> None:
    given = {
        "--tokenizer": "t", "--revision": "r", "--dtype": "float32", "--device": "cpu",
        "--quantization": "int8", "--engine-seed": "-3",
        "--max-model-len": "4K", "--block-size": "32", "--max-num-batched-tokens": "2k", "--max-num-seqs": "8",
        "--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.5", "--kv-cache-memory-bytes": "1G",
        "--num-kv-blocks": "9", "--scheduling-policy": "priority", "--max-logprobs": "7", "--load-format": "dummy",
        "--precompile": "all", "--compilation-cache-dir": "c",
        "--n": "2", "--presence-penalty": "0.5", "--frequency-penalty": "-0.5", "--repetition-penalty": "1.5",
        "--temperature": "0.9", "--top-p": "0.8", "--top-k": "5", "--min-p": "0.1", "--seed": "11", "--stop": "x",
        "--stop-token-ids": "3", "--max-tokens": "9", "--min-tokens": "1", "--logprobs": "2",
        "--truncate-prompt-tokens": "1k", "--prompt-logprobs": "3", "--logprob-token-ids": "4",
        "--allowed-token-ids": "5", "--bad-words": "w", "--logits-processors": "module:function",
        "--kernels": "sample=xla",
    }  # fmt: skip
    switches = [
        "--no-enable-prefix-caching", "--no-async-scheduling", "--enable-kv-cache-events", "--deterministic",
        "--ignore-eos", "--no-skip-special-tokens", "--include-stop-str-in-output", "--stop=--y",
        "--no-skip-reading-prefix-cache",
    ]  # fmt: skip
    code, _, _ = run("generate", "-m", "m", *(part for pair in given.items() for part in pair), *switches, "--", "p")
    assert code == 0
    assert EngineConfig(model="m", **FakeLLM.made.settings) == EngineConfig(
        model="m", tokenizer="t", revision="r", dtype="float32", device="cpu", seed=-3, max_model_len=4096,
        quantization="int8", block_size=32, enable_prefix_caching=False, deterministic=True,
        async_scheduling=False, enable_kv_cache_events=True, max_num_batched_tokens=2000, max_num_seqs=8,
        tensor_parallel_size=2, gpu_memory_utilization=0.5, kv_cache_memory_bytes=2**30, num_kv_blocks=9,
        scheduling_policy="priority", max_logprobs=7, load_format="dummy", precompile="all",
        compilation_cache_dir="c", logits_processors=("module:function",), kernels=("sample=xla",),
    )  # fmt: skip
    assert _params() == [
        SamplingParams(
            n=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, temperature=0.9, top_p=0.8,
            top_k=5, min_p=0.1, seed=11, stop=["x", "--y"], stop_token_ids=[3], ignore_eos=True, max_tokens=9,
            min_tokens=1, logprobs=2, skip_special_tokens=False, truncate_prompt_tokens=1000,
            include_stop_str_in_output=True, prompt_logprobs=3, logprob_token_ids=[4], allowed_token_ids=[5],
            bad_words=["w"], skip_reading_prefix_cache=False,
        )
    ]  # fmt: skip
    num_fields = len(fields(EngineConfig)) - 1 + len(fields(SamplingParams)) - len(flags._NO_FLAGS)
    assert num_fields == len(given) + len(switches) - 1  # --stop is there twice


def test_flags_that_are_not_given_leave_the_models_defaults(run: Run) -> None:
    run("generate", "p")
    assert FakeLLM.made.model is None and FakeLLM.made.settings == {} and FakeLLM.made.is_closed
    assert _params() == [SamplingParams(temperature=0.7, max_tokens=128)]
    run("generate", "--max-tokens", "none", "--min-tokens", "20", "-n", "3", "p")
    assert _params() == [SamplingParams(temperature=0.7, max_tokens=None, min_tokens=20, n=3)]


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("-1", -1), ("2k", 2000), ("2K", 2048), ("3m", 3 * 10**6), ("1T", 2**40)]
)
def test_integers_with_units(text: str, value: int) -> None:
    assert flags._integer(text) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["genrate"], "invalid choice: 'genrate'"),
        (["generate", "--temprature", "1", "x"], "unknown argument --temprature; did you mean --temperature?"),
        (
            ["generate", "--max-model-length=5", "x"],
            "unknown argument --max-model-length=5; did you mean --max-model-len?",
        ),
        (["chat", "--logprobs", "1"], "unknown argument --logprobs"),
        (["chat", "--prompt-logprobs", "1"], "unknown argument --prompt-logprobs"),
        (["chat", "--logprob-token-ids", "1"], "unknown argument --logprob-token-ids"),
        (["generate", "--max-tokens", "1.5k", "x"], "'1.5k' is not an integer (1k is 1000, 1K is 1024)"),
        (["generate", "--top-p", "x", "x"], "argument --top-p: invalid float value: 'x'"),
        (["generate", "--dtype", "int8", "x"], "argument --dtype: invalid choice: 'int8'"),
        (["generate", "--temperature", "-1", "x"], "--temperature must be non-negative, got -1.0."),
        (["generate", "--block-size", "0", "x"], "--block-size must be an integer from 1 to 256, got 0."),
        (["generate", "--min-tokens", "200", "x"], "--min-tokens must be less than or equal to --max-tokens=128"),
        (["doctor", "--max-num-seqs", "0"], "--max-num-seqs must be an integer"),
        (["chat", "--stop", ""], "--stop cannot contain an empty string."),
        (["generate", "--engine-seed", "9" * 30, "x"], "--engine-seed must be an integer"),
        (["doctor", "--seed", "9" * 30], "error: --seed must be an integer"),
        (["serve", "--ssl-certfile", "c"], "TLS needs both --ssl-keyfile and --ssl-certfile."),
        (["serve", "--port", "70000"], "--port must be from 0 to 65535"),
        (["serve", "/no/such/model"], "there is no folder /no/such/model"),
        (["serve", "--tensor-parallel-size", "512"], "--tensor-parallel-size is 512"),
        (["serve", "--record", "f", "--record-max-bytes", "5"], "--record-max-bytes must be at least 1048576."),
        (["serve", "--tool-call-parser", "x"], "--tool-call-parser must be one of hermes, llama3_json, got 'x'."),
        (["serve", "--reasoning-parser", "x"], "--reasoning-parser must be one of"),
        (["serve", "--otlp-traces-endpoint", "x"], "--otlp-traces-endpoint must be a URL such as"),
        (["serve", "--max-model-len", "1m"], "--max-model-len (1000000) is greater than what the model was made for"),
        (["serve", "--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
        (["generate", "--enforce-eager", "x"], "--enforce-eager is not supported by jaxllm yet; leave it out"),
        (["serve", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill is not supported by jaxllm yet"),
        (["serve", "-pp", "2"], "-pp 2 is not supported by jaxllm yet; leave it out"),
        (["serve", "--kv-cache-dtype=fp8"], "--kv-cache-dtype fp8 is not supported by jaxllm yet"),
        (["serve", "--enforce-eage"], "unknown argument --enforce-eage (see"),
        (["generate", "--file", "f", "x"], "give prompts as arguments or with --file, not both"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: list[str], message: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("jaxllm: error: ") and message in err and err.count("\n") == 1


def test_defaults_of_vllm_may_be_typed(run: Run) -> None:
    typed = ["--enable-chunked-prefill", "--pipeline-parallel-size", "1", "--kv-cache-dtype", "auto", "--dtype", "half"]
    code, _, _ = run("generate", *typed, "--no-trust-remote-code", "--cpu-offload-gb=0", "p")
    assert (code, FakeLLM.made.settings) == (0, {"dtype": "float16"})


def test_serve_takes_what_vllms_users_type(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("jaxllm_server.launch.serve", lambda server: served.append(server.options) or 0)
    monkeypatch.setattr("jaxllm_server.launch.configure_logging", lambda: None)
    parser = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert run("serve", *parser, "--disable-log-requests", "--disable-log-stats", "-pp", "1")[0] == 0
    (server,) = served
    assert (server.tool_call_parser, server.enable_log_requests, server.log_stats_interval) == ("hermes", False, 0.0)


def test_help_says_which_paths_need_the_key(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    said = " ".join(out.split())
    assert "every path but /health, /live and /ready (to /metrics, too" in said


def test_log_probabilities_without_json_are_warned_of(run: Run) -> None:
    code, out, err = run("generate", "--logprobs", "2", "--logprob-token-ids", "4", "p")
    assert (code, out) == (0, "<p>\n")
    assert err.startswith("jaxllm: warning: --logprobs, --logprob-token-ids: log-probabilities are written with --json")
    assert "warning" not in run("generate", "--json", "--logprobs", "2", "p")[2] + run("generate", "p")[2]


def test_an_unknown_key_of_a_config_file_is_told_with_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("max_model_length: 5\n")
    code, _, err = run("serve", "--config", str(path))
    assert code == 2
    assert f"{path}: unknown argument --max-model-length=5; did you mean --max-model-len?" in err
    code, _, err = run("serve", "--config", str(path), "--max-model-length=5")
    assert err.startswith("jaxllm: error: unknown argument --max-model-length=5")


def test_half_is_float16() -> None:
    assert EngineConfig.from_kwargs("m", dtype="half").dtype == "float16"


def test_help_and_version_import_no_jax() -> None:
    program = (
        "import sys, time; started = time.perf_counter()\n"
        "from jaxllm.cli import main\n"
        "assert [main(['--version']), main(['--help']), main(['generate', '--help'])] == [0, 0, 0]\n"
        "assert not {'jax', 'numpy', 'transformers', 'tokenizers', 'tqdm'} & set(sys.modules)\n"
        "print('seconds', time.perf_counter() - started)"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("jaxllm 0.") and "--max-tokens TOKENS" in shown and "(default: 128)" in shown
    assert float(shown.split("seconds")[-1]) < 1.0  # measured: 0.1


# ---- generate


def test_text_of_one_prompt_and_of_several(run: Run) -> None:
    assert run("generate", "a b") == (0, "<a b>\n", run_speed("2 prompt tokens, 2 tokens"))
    _, out, _ = run("generate", "a\nb", "x" * 70)
    assert out == f"==> a <==\n<a\nb>\n\n==> {'x' * 59}… <==\n<{'x' * 70}>\n\n"


class run_speed:
    """Equal to a line on speed that begins with `start`."""

    def __init__(self, start: str) -> None:
        self.start = start

    def __eq__(self, line: object) -> bool:
        return isinstance(line, str) and line.startswith(self.start) and line.endswith(" tokens/s\n")

    __hash__ = None  # type: ignore[assignment]


def test_prompts_from_standard_input(run: Run) -> None:
    assert run("generate", stdin="two\nlines\n")[1] == "<two\nlines>\n"
    code, out, err = run("generate", stdin="\n")
    assert (code, out) == (2, "") and "no prompt: give one as an argument" in err
    assert run("generate", "-", "b", stdin="a\n")[1] == "==> a <==\n<a>\n\n==> b <==\n<b>\n\n"
    assert run("generate", "b", stdin="unread")[1] == "<b>\n"
    code, out, err = run("generate", at_terminal=True)
    assert (code, out) == (2, "") and "no prompt: give one as an argument" in err


def test_prompts_from_a_file(run: Run, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first é\n\n  second \n", encoding="utf-8")
    assert run("generate", "--file", str(lines))[0] == 0
    assert [prompt for prompt, _ in FakeLLM.made.engine.seen] == ["first é", "  second "]
    records = '{"prompt": "a", "max_tokens": 3, "stop": "."}\n{"prompt": [1, 2], "temperature": 0}\n'
    _, out, _ = run("generate", "--file", "-", "--json", "--top-k", "4", stdin=records)
    assert _params() == [
        SamplingParams(temperature=0.7, top_k=4, max_tokens=3, stop="."),
        SamplingParams(temperature=0, max_tokens=128),
    ]
    first, second = map(json.loads, out.splitlines())
    assert first == {
        "prompt": "a", "index": 0, "text": "<a>", "prompt_tokens": 1, "completion_tokens": 1,
        "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    assert second["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "holds no prompt."),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b'{"prompt": "a"}\n{"prompt"', "line 2: Expecting"),
        (b'{"prompt": "a"}\n\n{"text": "b"}', 'line 3: expected an object with a "prompt"'),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: its lists and objects are nested too deeply"),
        (b'{"prompt": "a", "max_token": 3}', "line 1: 'max_token' is not a sampling parameter of jaxllm. Did you mean"),
        (b'{"prompt": "a", "top_p": 3}', "line 1: top_p must be in (0, 1], got 3"),
        (
            b'{"prompt": "a", "thinking_token_budget": 9}',
            "line 1: thinking_token_budget is not supported by jaxllm yet.",
        ),
    ],
)
def test_bad_files_are_named_with_the_line(content: bytes, message: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    code, out, err = run("generate", "--file", str(file))
    assert (code, out) == (1, "")
    assert str(file) in err and message in err and err.count("\n") == 1


def test_missing_file(run: Run) -> None:
    assert run("generate", "--file", "/no/such") == (1, "", "jaxllm: error: /no/such: No such file or directory\n")


def test_one_prompt_streams_to_a_terminal_and_stops_at_an_interrupt(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run("generate", "say one two", at_terminal=True)
    assert (code, out) == (0, "say one two \n")
    assert err == run_speed("0 prompt tokens, 3 tokens")
    code, out, _ = run("generate", "say one ^C never", at_terminal=True)
    assert (code, out) == (130, "say one … \n")
    assert FakeLLM.made.engine.aborted and FakeLLM.made.is_closed
    assert signal.getsignal(signal.SIGINT) is before, "the handler of ^C is the one that was there"


def test_an_output_that_failed_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = _output("0", "p", "", True, "error")
    monkeypatch.setattr(FakeLLM, "generate", lambda *_, **__: [failed])
    assert run("generate", "p")[0] == 1


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("broken", 1, "jaxllm: error: the device is gone\n"),
        ("wide", 1, "jaxllm: error: --tensor-parallel-size is 2 but JAX sees 1 device(s); use at most 1.\n"),
        ("odd", 1, "jaxllm: error: KeyError: 'weights' (--debug shows where)\n"),
        ("slow", 130, ""),
    ],
)
def test_errors_are_one_line(model: str, code: int, message: str, run: Run) -> None:
    assert run("generate", "-m", model, "p") == (code, "", message)


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(KeyError):
        run("generate", "-m", "odd", "--debug", "p")


STAND_IN = (
    "import sys; from types import ModuleType; from tests.test_cli import FakeLLM; import jaxllm.cli\n"
    "module = ModuleType('jaxllm.llm'); module.LLM = FakeLLM; sys.modules['jaxllm.llm'] = module\n"
)


def test_a_reader_that_leaves_is_no_error_message() -> None:
    program = f"{STAND_IN}sys.exit(jaxllm.cli.main(['generate', 'x' * 100_000, 'y']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        ((0,), ("generate", "p"), 0),
        ((0,), ("generate",), 2),  # it reads a prompt, and there is none
        ((1,), ("--help",), 0),
        ((1,), ("generate", "p"), 0),
        ((2,), ("generate", "p"), 0),
        ((2,), ("generate", "-m", "broken", "p"), 1),
        ((0, 1, 2), ("generate", "p"), 0),
    ],
)
def test_closed_streams_are_the_null_device(closed: tuple[int, ...], arguments: tuple[str, ...], code: int) -> None:
    program = f"{STAND_IN}sys.argv[1:] = {arguments!r}; jaxllm.cli.run()"
    shell = 'exec "$0" -c "$1" ' + " ".join(("<&-", ">&-", "2>&-")[number] for number in closed)
    command = ["/bin/sh", "-c", shell, sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "NoneType" not in done.stderr


def test_a_file_that_is_opened_later_gets_no_streams_number() -> None:
    """libuv aborts the process where an event loop has one, at its end."""
    program = (
        "import os, sys, jaxllm.cli\n"
        "jaxllm.cli.main = lambda: print(os.open(os.devnull, os.O_RDONLY), file=sys.stderr) or 0\n"
        "jaxllm.cli.run()"
    )
    command = ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stderr) > 2


# ---- chat


def test_chat_keeps_the_conversation(run: Run) -> None:
    code, out, err = run("chat", "--system", "S", stdin="hello\n\nagain\n/clear\nnew\n")
    assert code == 0
    assert [prompt["prompt"] for prompt, _ in FakeLLM.made.engine.seen] == [
        "s:S|u:hello", "s:S|u:hello|a:u:hello |u:again", "s:S|u:new",
    ]  # fmt: skip
    assert out == "u:hello \nu:again \nu:new \n"
    assert err == "The conversation is forgotten.\n"
    assert _params()[0] == SamplingParams(temperature=0.7, max_tokens=1024)


def test_chat_commands(run: Run) -> None:
    code, out, err = run("chat", stdin="/help\n/nope\n /exit \nnever\n")
    assert (code, out, FakeLLM.made.engine.seen) == (0, "", [])
    assert err == CHAT_HELP + "\nThere is no command /nope; /help lists them.\n"


def test_interrupt_ends_the_turn_and_not_the_chat(run: Run) -> None:
    code, out, err = run("chat", stdin="one ^C never\ntwo\n")
    assert (code, out, err) == (0, "u:one … \nu:two \n", "(stopped)\n")
    assert FakeLLM.made.engine.seen[1][0]["prompt"] == "u:one ^C never|a:u:one … |u:two"
    assert FakeLLM.made.engine.aborted


def test_answer_that_was_cut_off_says_so(run: Run) -> None:
    assert run("chat", stdin="be cut\n")[2] == "(cut off: --max-tokens or the context is used up)\n"


def test_oldest_turns_are_dropped_when_the_context_is_full(run: Run) -> None:
    """The fake has a token a letter and room for 100; a quarter of them is kept for the answer."""
    _, _, err = run("chat", "--system", "S", stdin="a" * 20 + "\n" + "b" * 20 + "\nc\n")
    last = FakeLLM.made.engine.seen[-1][0]["prompt"]
    assert last == f"s:S|u:{'b' * 20}|a:u:{'b' * 20} |u:c"
    assert err == "The context is full: the 2 oldest messages are forgotten.\n"


def test_message_that_never_fits_is_refused_and_forgotten(run: Run) -> None:
    code, out, err = run("chat", stdin="x" * 98 + "\nok\n")
    assert (code, out) == (0, "u:ok \n")
    assert err == "jaxllm: error: The message has 100 tokens with its template; the context holds 100.\n"
    assert FakeLLM.made.engine.seen[0][0]["prompt"] == "u:ok"


def test_chat_without_a_template_is_refused_at_once(run: Run) -> None:
    code, out, err = run("chat", "-m", "base", stdin="hello\n")
    assert (code, out, err) == (1, "", "jaxllm: error: base has no chat template; use `jaxllm generate`.\n")


def test_chat_at_a_terminal_prompts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = ["hi", KeyboardInterrupt(), EOFError()]
    prompts = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    code, out, err = run("chat", at_terminal=True)
    assert (code, prompts) == (0, ["> "] * 3)
    assert out == "u:hi \n\n\n" and err == "/help lists the commands, ^D ends.\n"


# ---- doctor, and the real engine


def test_doctor_explains_what_would_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "deep" / "jit_run-1-cache").write_bytes(b"x" * 1536)
    (tmp_path / "cache" / "jit_run-1-atime").write_bytes(b"")
    arguments = ["doctor", "--compilation-cache-dir", str(tmp_path / "cache"), "--max-num-seqs", "4"]
    code, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert code == 0 and report["usable"] and report["problems"] == []
    assert report["versions"]["jax"] and report["versions"]["python"].startswith("3.")
    assert report["devices"][0]["platform"] == "cpu"
    assert report["host"]["memory_bytes"] > report["host"]["free_bytes"] > 0
    assert report["cache"] == {
        "folder": str(tmp_path / "cache"), "programs": 1, "bytes": 1536, "is_writable": True
    }  # fmt: skip
    model = report["model"]
    assert model["max_num_seqs"] == {"value": 4, "why": "asked for"}
    assert model["dtype"] == {"value": "float32", "why": "the default on a CPU"}
    assert model["parameters"]["value"] > 1_000_000 and model["num_kv_blocks"]["value"] > 0
    code, out, _ = run(*arguments)
    assert code == 0
    assert "max_num_seqs: 4 (asked for)" in out and "1 programs, 1.5 KiB" in out and "the model can run" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-m", "/no/such"], "/no/such"),
        (["--device", "gpu"], "JAX sees none"),
        (["--max-model-len", "1m"], "max_model_len"),
        (["--tensor-parallel-size", "512"], "tensor_parallel_size is 512"),
    ],
)
def test_doctor_names_what_keeps_a_model_from_running(arguments: list[str], problem: str, run: Run) -> None:
    code, out, _ = run("doctor", "--json", *arguments)
    report = json.loads(out)
    assert (code, report["usable"]) == (1, False)
    assert len(report["problems"]) == 1 and problem in report["problems"][0]


def test_doctor_says_when_programs_cannot_be_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _, out, _ = run("doctor", "--json", "--compilation-cache-dir", str(tmp_path / "file" / "cache"))
    assert "every start compiles anew" in json.loads(out)["advice"][0]


def test_doctor_advises_on_a_gpu_that_jax_does_not_see(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxllm import doctor

    for is_there in (True, False):
        monkeypatch.setattr(doctor, "_has_nvidia_gpu", lambda is_there=is_there: is_there)
        _, out, _ = run("doctor", "--json")
        assert ("install jaxllm[cuda12]" in out) == is_there


def test_the_real_engine_generates_and_chats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The embedded model, loaded once for both commands."""
    from jaxllm.llm import LLM

    with LLM(**FEW_SLOTS) as llm:
        shared = SimpleNamespace(LLM=lambda *_, **__: _Kept(llm))
        monkeypatch.setitem(sys.modules, "jaxllm.llm", shared)
        expected = llm.generate(["The cat", "A dog"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "The cat"}\n{"prompt": "A dog"}\n')
        arguments = ["generate", "--file", str(prompts), "--json", "--temperature", "0", "--max-tokens", "6"]
        assert cli.main(arguments) == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["text"] for record in records] == [output.outputs[0].text for output in expected]
        assert [record["completion_tokens"] for record in records] == [len(o.outputs[0].token_ids) for o in expected]
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?\nWhat is 2 + 3?\n"))
        assert cli.main(["chat", "--temperature", "0", "--max-tokens", "24"]) == 0
        shown = capsys.readouterr().out
        question = [{"role": "user", "content": "Who are you?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0].text
        assert answer and shown.startswith(f"{answer}\n") and shown.count("\n") == 2 + answer.count("\n")


class _Kept:
    """A loaded model that a command may use and not close."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        pass
