"""`jaxllm chat`: a conversation in the terminal or from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.arguments import Subparsers, add_model, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.commands.session import add_request_flags, add_verbose, open_llm, params_of, stream, with_lora
from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

CHAT_TOKENS = 1024
_MEDIA = "image", "audio", "video"
_NO_FLAGS = {"n", "logprobs", "prompt_logprobs", "logprob_token_ids"}  # only one text is shown
CHAT_HELP = """\
/clear   forget the conversation (the system prompt stays)
/exit    exit, as ^D does
/help    this list
^C       stop the answer; its text so far stays in the conversation"""


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "chat", run, "talk with a model")
    parser.description = "Talk with a model.\n\n" + CHAT_HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--system", help="the system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image for the first message; may be repeated"
    )
    parser.add_argument(
        "--audio", action="append", default=[], metavar="FILE", help="a sound for the first message; may be repeated"
    )
    parser.add_argument(
        "--video", action="append", default=[], metavar="FILE", help="a video for the first message; may be repeated"
    )
    add_model(parser)
    add_verbose(parser)
    add_request_flags(parser, CHAT_TOKENS, skipped=_NO_FLAGS)
    add_engine_flags(parser.add_argument_group("engine"), skipped={"skip_tokenizer_init"})


def run(options: dict[str, Any]) -> int:
    options, further = with_lora(options)
    engine_config(options)
    from_flags = params_of(options, CHAT_TOKENS)
    system = [{"role": "system", "content": options["system"]}] if options["system"] else []
    media = [_part(kind, Path(path)) for kind in _MEDIA for path in options[kind]]
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _enable_line_editing()
    from jaxllm.media.patches import video_processor

    with open_llm(options, precompile="background") as llm:  # compiling takes a minute on a GPU
        params = replace(llm.get_default_sampling_params(), **from_flags)
        _check_template(llm, system, further)
        processor = llm.engine.model.processor
        read = set() if processor is None else {processor.kind}
        read |= set() if video_processor(processor) is None else {"video"}
        unread = next((kind for kind in _MEDIA if options[kind] and kind not in read), None)
        if unread is not None:
            noun = {"image": "images", "audio": "sound", "video": "videos"}[unread]
            raise UserError(f"{options['model'] or 'The model'} reads no {noun}; leave --{unread} out.", unread)
        history: list[dict[str, Any]] = list(system)
        if is_terminal:
            print("/help lists the commands, ^D ends.", file=sys.stderr)
        while (line := _read_line(is_terminal)) is not None:
            command = line.strip()
            if command == "/exit":
                break
            if command == "/clear":
                history = list(system)
                print("The conversation is cleared.", file=sys.stderr)
            elif command == "/help":
                print(CHAT_HELP, file=sys.stderr)
            elif command.startswith("/"):
                print(f"Unknown command {command}; /help lists the commands.", file=sys.stderr)
            elif command:
                content = [*media, {"type": "text", "text": line}] if len(history) == len(system) and media else line
                history = _turn(llm, history, content, params, further)
    return 0


def _check_template(llm: LLM, system: list[dict[str, str]], further: Mapping[str, Any]) -> None:
    try:
        llm.chat_prompt([*system, {"role": "user", "content": "Hello"}], **further)
    except UserError as error:
        raise UserError(str(error).replace("use generate()", "use `jaxllm generate`"), error.parameter) from error


def _part(kind: str, path: Path) -> dict[str, Any]:
    """Return a message's part for a file; `kind` is of `_MEDIA`."""
    from jaxllm.media import films, images, sound_files

    most = {"image": images, "audio": sound_files, "video": films}[kind].MOST_BYTES
    try:
        with path.expanduser().open("rb") as file:
            data: Any = file.read(most + 1)
    except OSError as error:
        raise UserError(f"--{kind}: {path} cannot be read: {error.strerror}.", kind) from None
    if kind == "image":
        data = images.decode(data, f"--{kind}: {path}", kind)
    if kind == "video":
        films.read_film(data, f"--{kind}: {path}", kind)
    return {"type": kind, kind: data}


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() a history and editing keys
    except ImportError:  # Windows; its console edits lines
        pass


def _read_line(is_terminal: bool) -> str | None:
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
            print()  # ^C drops the line


def _turn(
    llm: LLM, history: list[dict[str, Any]], content: Any, params: SamplingParams, further: Mapping[str, Any]
) -> list[dict[str, Any]]:
    try:
        messages, prompt = _fit(llm, [*history, {"role": "user", "content": content}], params.max_tokens, further)
        num_dropped = len(history) + 1 - len(messages)
        if num_dropped:
            print(f"The context is full: the {num_dropped} oldest messages were dropped.", file=sys.stderr)
        output, was_interrupted = stream(llm, prompt, params, further)
    except UserError as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return history
    print()
    completion = output.outputs[0] if output is not None else None
    if completion is not None and completion.finish_reason == "error":
        print(f"jaxllm: error: the answer failed: {completion.stop_reason}", file=sys.stderr)
        return history
    if was_interrupted:
        print("(stopped)", file=sys.stderr)
    elif completion is not None and completion.finish_reason == "length":
        print("(truncated: --max-tokens or the context is used up)", file=sys.stderr)
    if completion is None or not completion.text:
        return history
    return [*messages, {"role": "assistant", "content": completion.text}]


def _fit(
    llm: LLM, messages: list[dict[str, Any]], max_tokens: int | None, further: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Drop the oldest turns, without their images and sounds, until an answer fits; return messages and prompt.

    Reserves `max_tokens`, at most a quarter of the context: a truncated answer is better than a forgotten turn. Raises
    `UserError` if the last message does not fit.
    """
    limit = llm.engine.model.max_model_len
    room = min(max_tokens or limit, limit // 4)
    first = 1 if messages[0]["role"] == "system" else 0
    while True:
        prompt = llm.chat_prompt(messages, **further)
        num_tokens = len(prompt["prompt_token_ids"])
        if num_tokens + room <= limit or (len(messages) == first + 1 and num_tokens < limit):
            return messages, prompt
        if len(messages) == first + 1:
            raise UserError(f"The message has {num_tokens} tokens with its template; the context has {limit}.")
        dropped, rest = messages[first], messages[first + 2 :]
        messages = messages[:first] + _with_media_of(dropped, rest)


def _with_media_of(dropped: dict[str, Any], rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the images and sounds of a dropped message to the next one of the user."""
    if isinstance(dropped["content"], str):
        return rest
    media = [part for part in dropped["content"] if part["type"] in _MEDIA]
    following = {"role": "user", "content": [*media, {"type": "text", "text": rest[0]["content"]}]}
    return [following, *rest[1:]]
