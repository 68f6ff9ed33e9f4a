"""The command line: `jaxllm generate`, `chat`, `embed`, `serve`, `bench`, `compile`, `convert`, `doctor`,
`replay`.

Finds the command, and reports every mistake and failure in one line; what a command takes and does is in its module of
`jaxllm.commands`. JAX is imported when a command runs, not for `--help` or for a flag that is wrong.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after ^C.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jaxllm.commands import bench, chat, compile, convert, doctor, embed, generate, replay, serve
from jaxllm.commands.arguments import Usage
from jaxllm.commands.flags import IDLE, read_config_file
from jaxllm.compiling import compile_noise
from jaxllm.config import no_effect
from jaxllm.errors import EngineError, UserError
from jaxllm.version import __version__

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "embed": embed,
    "serve": serve,
    "bench": bench,
    "compile": compile,
    "convert": convert,
    "doctor": doctor,
    "replay": replay,
}


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
        options = parse(argv)
        if idle := options.pop(IDLE, None):
            print("jaxllm: warning:", no_effect(idle), file=sys.stderr)
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
    _open_closed_streams()
    compile_noise.hide()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """Open the null device where a standard stream is closed, as by `<&-` and `>&-`.

    Python has None for such a stream. And its number would go to the next file that is opened: to the event loop,
    which libuv then refuses to close, and the process dies of SIGABRT after a clean drain.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets this number: it is the lowest that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _report(error: Exception) -> int:
    """Say what went wrong in one line; return the exit code."""
    message = str(error) or type(error).__name__
    if isinstance(error, Usage):
        command = next((argument for argument in sys.argv[1:2] if argument in COMMANDS), "")
        if command == "bench" and sys.argv[2:3] and sys.argv[2] in bench.BENCHMARKS:
            command = f"bench {sys.argv[2]}"
        message = f"{message} (see jaxllm {command}{' ' if command else ''}--help)"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, UserError | EngineError):
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    print("jaxllm: error:", " ".join(message.split()), file=sys.stderr)
    return 2 if isinstance(error, Usage) else 1


def parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Read the command line into the options that were given, and the function of the command as "run"."""
    parser = _Parser(prog="jaxllm", description="Run a language model on JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxllm {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS.values():
        command.add(subparsers)
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, extra = parser.parse_known_args(arguments)
    from_file: list[str] = []
    if getattr(options, "config", None) is not None:
        from_file = read_config_file(options.config, arguments)
        arguments[1:1] = from_file
        options, extra = parser.parse_known_args(arguments)
    if extra:
        names = list(_flags_of(subparsers.choices[options.command], options))
        flag = extra[0].split("=")[0]
        near = difflib.get_close_matches(flag, names, n=1, cutoff=0.75)
        place = f"{options.config}: " if extra[0] in from_file else ""
        raise Usage(f"{place}unknown argument {extra[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    return vars(options)


def _flags_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """Name the flags of a command, and of the one within it that was chosen."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            yield from _flags_of(action.choices[getattr(options, action.dest)], options)
