"""The command line: `jaxllm generate`, `jaxllm chat`, `jaxllm serve`, `jaxllm doctor`.

Flags are derived from the fields of `EngineConfig` and `SamplingParams`, so a new field is a new flag. Knows terminals,
files and exit codes; everything about a request is decided behind `LLM`. JAX is imported when a command runs, not for
`--help` or for a flag that is wrong.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after ^C.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from jaxllm import __version__, flags
from jaxllm.config import NOT_BUILT, EngineConfig
from jaxllm.errors import EngineError, UserError
from jaxllm.flags import given
from jaxllm.types import RequestOutput, SamplingParams
from jaxllm_server.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm.llm import LLM

COMMANDS = ("generate", "chat", "serve", "doctor")
GENERATE_TOKENS = 128  # default of `generate --max-tokens`: a look at a model, not an essay
CHAT_TOKENS = 1024  # default of `chat --max-tokens`: an answer should end by itself
REQUEST_ID = "cli"
CHAT_HELP = """\
/clear   forget the conversation (the system prompt stays)
/exit    leave, as ^D does
/help    this list
^C       stop the answer; what was written of it stays in the conversation"""


class Usage(Exception):
    """What was typed is wrong; the message says how to do it."""


class _Parser(argparse.ArgumentParser):
    """argparse that reports every mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise Usage(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; one line on stderr for whatever goes wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", rather than nothing more
    is_debugging = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        options = _parse(argv)
        exit_code = options.pop("run")(options)
        sys.stdout.flush()
        return exit_code
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, as `head`, has had enough. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_debugging:
            raise
        return _report(error)


def run() -> NoReturn:
    """Run the command line as a process of its own, and end it at once.

    Without this the process would first wait for the program that is being compiled in the background.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(error: Exception) -> int:
    """Say what went wrong in one line; return the exit code."""
    message = str(error) or type(error).__name__
    if isinstance(error, Usage):
        command = next((argument for argument in sys.argv[1:2] if argument in COMMANDS), "")
        message = f"{message} (see jaxllm {command}{' ' if command else ''}--help)"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, UserError | EngineError):
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    print("jaxllm: error:", " ".join(message.split()), file=sys.stderr)
    return 2 if isinstance(error, Usage) else 1


def _parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Read the command line into the options that were given, and the function of the command as "run"."""
    parser = _Parser(prog="jaxllm", description="Run a language model on JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxllm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        allow_abbrev=False,
        description="Continue each prompt. Without PROMPT and --file, standard input is one prompt, and so is the "
        "PROMPT '-'.",
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; '-': standard input")
    generate.add_argument(
        "--file",
        help="a prompt a line; or, if the first line begins with '{', JSON lines with a \"prompt\" and the sampling "
        "parameters that differ; '-': standard input",
    )
    generate.add_argument("--json", action="store_true", help="write one JSON object a line for each output")
    chat = commands.add_parser(
        "chat", help="talk with a model", allow_abbrev=False, description="Talk with a model.\n\n" + CHAT_HELP
    )
    chat.formatter_class = argparse.RawDescriptionHelpFormatter
    chat.add_argument("--system", help="the system prompt")
    serve = commands.add_parser(
        "serve",
        help="serve a model over gRPC and OpenAI-compatible HTTP",
        allow_abbrev=False,
        description="Serve a model over gRPC and OpenAI-compatible HTTP, on this machine only unless --host says "
        "otherwise.",
    )
    serve.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub id, as --model")
    serve.add_argument("--config", metavar="FILE", help="YAML file of flags; those given here go before")
    flags.add_server_flags(serve.add_argument_group("server"), ServerOptions)
    doctor = commands.add_parser(
        "doctor",
        help="show versions, devices and what would be used for a model",
        allow_abbrev=False,
        description="Show versions, devices, memory and caches, and what would be used for a model and why. "
        "The exit code is 0 if the model can run.",
    )
    doctor.add_argument("--json", action="store_true", help="write one JSON object")
    for command, run in ((generate, _generate), (chat, _chat), (serve, _serve), (doctor, _doctor)):
        command.set_defaults(run=run)
        command.add_argument("-m", "--model", help="folder or hub id (default: the small model within jaxllm)")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if command in (generate, chat):
            sampling = command.add_argument_group("sampling")
            if command is generate:
                flags.add_sampling_flags(sampling, GENERATE_TOKENS)
            else:
                flags.add_sampling_flags(sampling, CHAT_TOKENS, skipped={"n", "logprobs"})
        flags.add_engine_flags(command.add_argument_group("engine"), has_sampling=command in (generate, chat))
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, extra = parser.parse_known_args(arguments)
    if getattr(options, "config", None) is not None:
        arguments[1:1] = flags.read_config_file(options.config, arguments)
        options, extra = parser.parse_known_args(arguments)
    if extra:
        known = commands.choices[options.command]
        names = [name for action in known._actions for name in action.option_strings]
        flag = extra[0].split("=")[0]
        if flag.removeprefix("--").replace("-", "_") in NOT_BUILT:
            raise Usage(f"{flag} is not supported by jaxllm yet")
        near = difflib.get_close_matches(flag, names, n=1, cutoff=0.75)
        raise Usage(f"unknown argument {extra[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    return vars(options)


def _check(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Refuse flags with bad values before anything is loaded."""
    try:
        EngineConfig(model=options["model"] or "", **given(options, EngineConfig))
        SamplingParams(**sampling)
    except UserError as error:
        raise Usage(str(error)) from error


@contextmanager
def _open(options: Mapping[str, Any]) -> Iterator[LLM]:
    from jaxllm.llm import LLM

    with LLM(options["model"], use_tqdm=sys.stderr.isatty(), **given(options, EngineConfig)) as llm:
        yield llm


def _generate(options: dict[str, Any]) -> int:
    own = {"max_tokens": GENERATE_TOKENS, **given(options, SamplingParams)}
    _check(options, own)
    jobs = _read_prompts(options, own)
    with _open(options) as llm:
        default = llm.get_default_sampling_params()
        params = [replace(default, **{**own, **override}) for _, override in jobs]
        started = time.monotonic()
        if len(jobs) == 1 and params[0].n == 1 and not options["json"] and sys.stdout.isatty():
            output, was_interrupted = _stream(llm, jobs[0][0], params[0])
            print()
            if was_interrupted or output is None:
                return 130
            outputs = [output]
        else:
            outputs = llm.generate([prompt for prompt, _ in jobs], params, use_tqdm=sys.stderr.isatty())
            _write(outputs, options["json"])
        _write_speed(outputs, time.monotonic() - started)
    return 1 if any(completion.finish_reason == "error" for output in outputs for completion in output.outputs) else 0


def _read_prompts(options: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Collect the prompts, each with the sampling parameters of its own."""
    prompts, file = options["prompts"], options["file"]
    if file is not None and prompts:
        raise Usage("give prompts as arguments or with --file, not both")
    if file is not None:
        jobs = _prompts_of_file(file, own)
        if not jobs:
            raise UserError(f"{file} holds no prompt.")
        return jobs
    if not prompts and sys.stdin.isatty():
        raise Usage("no prompt: give one as an argument, with --file, or on standard input")
    return [(_read("-").removesuffix("\n") if prompt == "-" else prompt, {}) for prompt in prompts or ["-"]]


def _prompts_of_file(file: str, own: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Read a prompt a line, or a JSON object a line; blank lines are skipped."""
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), 1) if line.strip()]
    if not lines or not (file.endswith(".jsonl") or lines[0][1].lstrip().startswith("{")):
        return [(line, {}) for _, line in lines]
    jobs = []
    for number, line in lines:
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "prompt" not in record:
                raise UserError('expected an object with a "prompt"')
            prompt = record.pop("prompt")
            SamplingParams(**{**own, **record})
        except ValueError as error:  # json's and ours
            raise UserError(f"{file}, line {number}: {error}") from error
        jobs.append((prompt, record))
    return jobs


def _read(file: str) -> str:
    """Read a file, or standard input for '-', as UTF-8."""
    try:
        if file == "-":
            return sys.stdin.read()
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{'standard input' if file == '-' else file} is not UTF-8 text: {error.reason}.") from error


def _write(outputs: Sequence[RequestOutput], as_json: bool) -> None:
    """Write finished outputs: text, with a header each where there are several, or JSON lines."""
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for output in outputs:
        for completion in output.outputs:
            if as_json:
                print(json.dumps(_record(output, completion.index), ensure_ascii=False))
                continue
            if several:
                shown = output.prompt if output.prompt is not None else str(list(output.prompt_token_ids))
                first_line = (shown.strip().split("\n") or [""])[0]
                print(f"==> {first_line if len(first_line) <= 60 else first_line[:59] + '…'} <==")
            print(completion.text + ("\n" if several else ""))


def _record(output: RequestOutput, index: int) -> dict[str, Any]:
    completion = output.outputs[index]
    record = {
        "prompt": list(output.prompt_token_ids) if output.prompt is None else output.prompt,
        "index": index,
        "text": completion.text,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [
            [{"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
             for token, entry in position.items()]
            for position in completion.logprobs
        ]  # fmt: skip
    return record


def _write_speed(outputs: Sequence[RequestOutput], seconds: float) -> None:
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    speed = num_out / max(seconds, 1e-9)
    print(f"{num_in} prompt tokens, {num_out} tokens in {seconds:.2f} s: {speed:.1f} tokens/s", file=sys.stderr)


@contextmanager
def _noting_interrupts() -> Iterator[threading.Event]:
    """Have ^C set an event instead of breaking off a step, which would cost the engine its cache; a second ^C does."""
    seen = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield seen  # only the main thread may handle signals
        return

    def note(*_: object) -> None:
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[RequestOutput | None, bool]:
    """Write a request's text as it comes; return its last output and whether ^C ended it."""
    output, num_shown = None, 0
    with _noting_interrupts() as interrupt:
        llm.engine.add_request(REQUEST_ID, prompt, params)
        try:
            while llm.engine.has_unfinished_requests() and not interrupt.is_set():
                for output in llm.engine.step():
                    text = output.outputs[0].text
                    print(text[num_shown:], end="", flush=True)
                    num_shown = len(text)
        finally:
            llm.engine.abort_request(REQUEST_ID)  # nothing happens where it has ended
    return output, interrupt.is_set() and (output is None or not output.finished)


def _chat(options: dict[str, Any]) -> int:
    own = {"max_tokens": CHAT_TOKENS, **given(options, SamplingParams)}
    _check(options, own)
    system = [{"role": "system", "content": options["system"]}] if options["system"] else []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _enable_line_editing()
    with _open(options) as llm:
        params = replace(llm.get_default_sampling_params(), **own)
        llm.chat_prompt(
            [*system, {"role": "user", "content": "Hello"}]
        )  # has it a template, one that takes the system?
        history = list(system)
        if is_terminal:
            print("/help lists the commands, ^D ends.", file=sys.stderr)
        while (line := _read_line(is_terminal)) is not None:
            command = line.strip()
            if command == "/exit":
                break
            if command == "/clear":
                history = list(system)
                print("The conversation is forgotten.", file=sys.stderr)
            elif command == "/help":
                print(CHAT_HELP, file=sys.stderr)
            elif command.startswith("/"):
                print(f"There is no command {command}; /help lists them.", file=sys.stderr)
            elif command:
                history = _turn(llm, history, line, params)
    return 0


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() a history and editing keys
    except ImportError:  # Windows has none, and edits lines by itself
        pass


def _read_line(is_terminal: bool) -> str | None:
    """Read what the user says; None at the end of the input."""
    while True:
        try:
            return input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()  # ^C drops the line, as in a shell


def _turn(llm: LLM, history: list[dict[str, str]], line: str, params: SamplingParams) -> list[dict[str, str]]:
    """Answer one line; return the conversation with both, or as it was where there is no answer."""
    try:
        messages, prompt = _fit(llm, [*history, {"role": "user", "content": line}], params.max_tokens)
        num_dropped = len(history) + 1 - len(messages)
        if num_dropped:
            print(f"The context is full: the {num_dropped} oldest messages are forgotten.", file=sys.stderr)
        output, was_interrupted = _stream(llm, prompt, params)
    except UserError as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return history
    print()
    completion = output.outputs[0] if output is not None else None
    if completion is not None and completion.finish_reason == "error":
        print(f"jaxllm: error: the answer broke off: {completion.stop_reason}", file=sys.stderr)
        return history
    if was_interrupted:
        print("(stopped)", file=sys.stderr)
    elif completion is not None and completion.finish_reason == "length":
        print("(cut off: --max-tokens or the context is used up)", file=sys.stderr)
    if completion is None or not completion.text:
        return history
    return [*messages, {"role": "assistant", "content": completion.text}]


def _fit(
    llm: LLM, messages: list[dict[str, str]], max_tokens: int | None
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Drop the oldest questions and answers until the conversation leaves room for an answer; give it and its prompt.

    Room is `max_tokens`, but at most a quarter of the context: to forget costs more than an answer that is cut off.
    """
    limit = llm.engine.max_model_len
    room = min(max_tokens or limit, limit // 4)
    first = 1 if messages[0]["role"] == "system" else 0
    while True:
        prompt = llm.chat_prompt(messages)
        num_tokens = len(prompt["prompt_token_ids"])
        if num_tokens + room <= limit or (len(messages) == first + 1 and num_tokens < limit):
            return messages, prompt
        if len(messages) == first + 1:
            raise UserError(f"The message has {num_tokens} tokens with its template; the context holds {limit}.")
        messages = messages[:first] + messages[first + 2 :]


def _serve(options: dict[str, Any]) -> int:
    from jaxllm.embedded import MODEL_DIR

    lists = {name: tuple(value) for name, value in given(options, ServerOptions).items() if isinstance(value, list)}
    try:
        config = EngineConfig(
            model=options["model_tag"] or options["model"] or str(MODEL_DIR), **given(options, EngineConfig)
        )
        server = ServerOptions(**{**given(options, ServerOptions), **lists})
    except UserError as error:
        raise Usage(str(error)) from error
    from jaxllm_server.launch import serve

    return serve(config, server, progress=sys.stderr.isatty())


def _doctor(options: dict[str, Any]) -> int:
    _check(options, {})
    from jaxllm import doctor
    from jaxllm.embedded import MODEL_DIR

    config = EngineConfig(model=options["model"] or str(MODEL_DIR), **given(options, EngineConfig))
    report = doctor.examine(config)
    print(json.dumps(report, indent=2) if options["json"] else doctor.describe(report))
    return 0 if report["usable"] else 1
