"""The command line: what it reads, writes and returns, with a stand-in for the engine; at the end with the real one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.commands import cli
from jaxllm.commands.chat import CHAT_HELP
from jaxllm.sampling_params import SamplingParams
from tests.support.fake_llm import FakeLLM, Run, output_of, seen_params
from tests.support.paths import ROOT
from tests.support.sizes import FEW_SLOTS


def test_help_and_version_import_no_jax() -> None:
    program = (
        "import sys, time; started = time.perf_counter()\n"
        "from jaxllm.commands.cli import main\n"
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
    assert seen_params() == [
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
    failed = output_of("0", "p", "", True, "error")
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
    "import sys; from types import ModuleType; from tests.support.fake_llm import FakeLLM; import jaxllm.commands.cli\n"
    "module = ModuleType('jaxllm.llm'); module.LLM = FakeLLM; sys.modules['jaxllm.llm'] = module\n"
)


@pytest.mark.ci
def test_a_reader_that_leaves_is_no_error_message() -> None:
    program = f"{STAND_IN}sys.exit(jaxllm.commands.cli.main(['generate', 'x' * 100_000, 'y']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.ci
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
    program = f"{STAND_IN}sys.argv[1:] = {arguments!r}; jaxllm.commands.cli.run()"
    shell = 'exec "$0" -c "$1" ' + " ".join(("<&-", ">&-", "2>&-")[number] for number in closed)
    command = ["/bin/sh", "-c", shell, sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "NoneType" not in done.stderr


def test_a_file_that_is_opened_later_gets_no_streams_number() -> None:
    """libuv aborts the process where an event loop has one, at its end."""
    program = (
        "import os, sys, jaxllm.commands.cli\n"
        "jaxllm.commands.cli.main = lambda: print(os.open(os.devnull, os.O_RDONLY), file=sys.stderr) or 0\n"
        "jaxllm.commands.cli.run()"
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
    assert err == "The conversation is cleared.\n"
    assert seen_params()[0] == SamplingParams(temperature=0.7, max_tokens=1024)


def test_chat_commands(run: Run) -> None:
    code, out, err = run("chat", stdin="/help\n/nope\n /exit \nnever\n")
    assert (code, out, FakeLLM.made.engine.seen) == (0, "", [])
    assert err == CHAT_HELP + "\nUnknown command /nope; /help lists the commands.\n"


def test_interrupt_ends_the_turn_and_not_the_chat(run: Run) -> None:
    code, out, err = run("chat", stdin="one ^C never\ntwo\n")
    assert (code, out, err) == (0, "u:one … \nu:two \n", "(stopped)\n")
    assert FakeLLM.made.engine.seen[1][0]["prompt"] == "u:one ^C never|a:u:one … |u:two"
    assert FakeLLM.made.engine.aborted


def test_answer_that_was_cut_off_says_so(run: Run) -> None:
    assert run("chat", stdin="be cut\n")[2] == "(truncated: --max-tokens or the context is used up)\n"


def test_oldest_turns_are_dropped_when_the_context_is_full(run: Run) -> None:
    """The fake has a token a letter and room for 100; a quarter of them is kept for the answer."""
    _, _, err = run("chat", "--system", "S", stdin="a" * 20 + "\n" + "b" * 20 + "\nc\n")
    last = FakeLLM.made.engine.seen[-1][0]["prompt"]
    assert last == f"s:S|u:{'b' * 20}|a:u:{'b' * 20} |u:c"
    assert err == "The context is full: the 2 oldest messages were dropped.\n"


def test_message_that_never_fits_is_refused_and_forgotten(run: Run) -> None:
    code, out, err = run("chat", stdin="x" * 98 + "\nok\n")
    assert (code, out) == (0, "u:ok \n")
    assert err == "jaxllm: error: The message has 100 tokens with its template; the context has 100.\n"
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


def test_an_adapter_is_asked_for_by_its_folder_alone(run: Run, tmp_path: Path) -> None:
    fields = {"r": 4, "rank_pattern": {"q_proj": 24, "k_proj": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    for rank, more in ((24, ()), (64, ("--max-lora-rank", "64"))):
        arguments = ["--lora", str(tmp_path), *more]
        assert run("generate", *arguments, "a b")[:2] == (0, "<a b>\n")
        own = {"precompile": "background", "enable_lora": True, "max_lora_rank": rank}
        assert FakeLLM.made.settings == own
        assert [own and own.lora_path for own in FakeLLM.made.engine.adapters] == [str(tmp_path)]
        assert run("chat", *arguments, stdin="hi\n")[0] == 0
        own = FakeLLM.made.engine.adapters  # of the template's check, the conversation and its answer
        assert [each and each.lora_path for each in own] == [str(tmp_path)] * 3
    code, _, err = run("generate", "--lora", "/no/adapter", "a")
    assert code == 1 and err.startswith("jaxllm: error: adapter '/no/adapter': there is no folder /no/adapter")
    assert "has no adapter_config.json." in run("chat", "--lora", str(tmp_path.parent))[2]


# ---- the real engine


@pytest.mark.ci
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
