"""`jaxllm transcribe`: write the words of files of sound with a model such as Whisper.

Windows, Whisper's of 30 s, follow each other within a file, those of different files run in one batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.arguments import Subparsers, add_model, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.commands.session import add_verbose, open_llm
from jaxllm.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.engine.features.speech.transcription import Transcription

FORMATS = ("text", "srt", "vtt", "json")


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "transcribe", run, "write the words of files of sound")
    parser.description = (
        "Write the words of files of sound, by a model such as Whisper: WAV, and with soundfile FLAC, OGG and MP3. "
        "Files longer than the encoder reads (Whisper's 30 s) are read in windows, each from the end of the last whole "
        "segment on."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file of sound, of any rate")
    parser.add_argument("--language", metavar="CODE", help="language, as 'en' (default: that of a file's beginning)")
    tasks = ("transcribe", "translate")
    parser.add_argument("--task", choices=tasks, default=tasks[0], help="translate: write the words in English")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="a text before the words, for names and style")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="the words alone, subtitles, or a line of JSON for each segment (default: text)",
    )
    add_model(parser, "the small recogniser in jaxllm, of a hundred English words")
    add_verbose(parser)
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False, skipped={"task"})


def run(options: dict[str, Any]) -> int:
    """Print the text of each file; return 1 if one failed."""
    options["model"] = options["model"] or "jaxllm-speech"
    engine_config(options)
    files = list(dict.fromkeys(options["files"]))
    sounds = [_read(file) for file in files]  # raises before the model loads
    from jaxllm.engine.features.speech import offline
    from jaxllm.engine.features.speech.rules import rules_of
    from jaxllm.engine.features.speech.transcription import Asked, Transcription, text_before

    with open_llm(options) as llm:
        model = llm.engine.model
        rules = rules_of(model)
        if rules is None or model.sources is None or model.sources.sound is None:
            raise UserError(f"{options['model']} reads no sound; choose a model such as Whisper.", "model")
        asked = Asked(
            task=options["task"],
            language=options["language"],
            before=text_before(model, options["prompt"]),
            timestamps=options["format"] != "text",
        )
        recordings = [model.sources.sound.recording(samples) for samples in sounds]
        made = [Transcription(model, rules, recording, asked) for recording in recordings]
        with _Bar(made) as bar:
            failures = offline.run(llm.engine, made, bar.update)
    for number, (file, own) in enumerate(zip(files, made, strict=True)):
        if number in failures:
            print(f"{file}: {failures[number]}", file=sys.stderr)
        _print(file, own, options["format"])
    return 1 if failures else 0


class _Bar:
    """A progress bar of seconds, on a terminal."""

    def __init__(self, made: Sequence[Transcription]) -> None:
        from tqdm import tqdm

        self._made = made
        total = round(sum(own.seconds for own in made), 1)
        shown = "{l_bar}{bar}| {n:.0f}/{total:.0f} s [{elapsed}<{remaining}]"
        self._bar = tqdm(total=total, desc="transcribing", bar_format=shown, disable=not sys.stderr.isatty())

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        done = sum(own.seconds * min(1.0, own.seek / own.num_frames) for own in self._made)
        self._bar.update(done - self._bar.n)


def _print(file: Path, made: Transcription, form: str) -> None:
    from jaxllm.engine.features.speech.subtitles import subtitles

    if form == "text":
        print(made.text)
    elif form == "json":
        for each in made.segments:
            times = {"start": round(each.start, 2), "end": round(each.end, 2)}
            print(json.dumps({"file": str(file), **times, "text": each.text.strip()}, ensure_ascii=False))
    else:
        print(subtitles(made.segments, form), end="")


def _read(file: Path) -> np.ndarray:
    from jaxllm.media.sound_files import read_sound

    try:
        return read_sound(file.read_bytes())
    except UserError as error:
        raise UserError(f"{file}: {error}", "file") from error
