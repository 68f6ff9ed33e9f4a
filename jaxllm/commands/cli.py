"""The command line `jaxllm`: runs a command, and reports errors in one line.

Imports JAX only for that. Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after ^C.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jaxllm.commands import bench, chat, compile, convert, doctor, embed, generate, replay, serve, transcribe
from jaxllm.commands.arguments import UsageError
from jaxllm.commands.flags import IDLE, read_config_file
from jaxllm.compiling import compile_noise
from jaxllm.config import no_effect
from jaxllm.errors import EngineError, UserError
from jaxllm.version import __version__

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "embed": embed,
    "transcribe": transcribe,
    "serve": serve,
    "bench": bench,
    "compile": compile,
    "convert": convert,
    "doctor": doctor,
    "replay": replay,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" without Unicode
    is_debugging = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        options = parse(argv)
        if idle := options.pop(IDLE, None):
            print("jaxllm: warning:", no_effect(idle), file=sys.stderr)
        exit_code = options.pop("run")(options)
        sys.stdout.flush()
        return exit_code
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe; the final flush would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_debugging:
            raise
        return _report(error)


def run() -> NoReturn:
    """Run a command, and exit without waiting for background compilations."""
    _open_closed_streams()
    compile_noise.hide()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """Open the null device for each closed standard stream, as by `<&-`.

    The event loop would get its descriptor, which libuv refuses to close: SIGABRT after a clean drain.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _report(error: Exception) -> int:
    message = str(error) or type(error).__name__
    if isinstance(error, UsageError):
        command = next((argument for argument in sys.argv[1:2] if argument in COMMANDS), "")
        if command == "bench" and sys.argv[2:3] and sys.argv[2] in bench.BENCHMARKS:
            command = f"bench {sys.argv[2]}"
        message = f"{message} (see jaxllm {command}{' ' if command else ''}--help)"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, UserError | EngineError):
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    print("jaxllm: error:", " ".join(message.split()), file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Parse the command line, with `--config`; return options, "run" being the command's function."""
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
        raise UsageError(f"{place}unknown argument {extra[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    return vars(options)


def _flags_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            yield from _flags_of(action.choices[getattr(options, action.dest)], options)
