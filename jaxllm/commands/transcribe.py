"""`jaxllm transcribe`: write the words of WAV files, cut at quiet moments, with a model such as Whisper."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.commands.arguments import Subparsers, UsageError, add_model, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.commands.session import add_verbose, open_llm
from jaxllm.errors import UserError
from jaxllm.sampling_params import MAX_BIASED_TOKENS, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.llm import LLM

RATE = 16000  # samples per second
_SEARCHED = 1 / 6  # of a piece: where the quietest moment is searched
_FRAME, _QUIET = 160, 10  # samples, frames


class Piece(NamedTuple):
    """A part of a file."""

    file: Path
    start: int  # sample at 16 kHz
    samples: np.ndarray


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "transcribe", run, "write the words of WAV files")
    parser.description = (
        "Write the words of WAV files, by a model such as Whisper. Files longer than the encoder reads (30 s) are cut "
        "at quiet moments."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a WAV file of integers, of any rate")
    parser.add_argument("--language", metavar="CODE", help="language, as 'en' (default: that of a file's beginning)")
    parser.add_argument("--translate", action="store_true", help="write the words in English")
    parser.add_argument("--json", action="store_true", help="write one line of JSON for each piece, with its times")
    add_model(parser, "none")
    add_verbose(parser)
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False)


def run(options: dict[str, Any]) -> int:
    if options["model"] is None:
        raise UsageError("no model: give one whose encoder reads sound, for example --model openai/whisper-small")
    engine_config(options)
    files = list(dict.fromkeys(options["files"]))
    sounds = [_read(file) for file in files]  # fails before the model loads
    with open_llm(options) as llm:
        prompts = llm.engine.model.sources
        if prompts is None or prompts.sound is None:
            raise UserError(f"{options['model']} reads no sound; choose a model such as Whisper.", "model")
        longest = prompts.sound.num_samples
        pieces = [
            Piece(file, start, samples[start:end])
            for file, samples in zip(files, sounds, strict=True)
            for start, end in cuts(samples, longest)
        ]
        outputs = _transcribe(llm, pieces, options["language"], options["translate"])
    for file in files:
        own = [(piece, text) for piece, text in zip(pieces, outputs, strict=True) if piece.file == file]
        if options["json"]:
            for piece, text in own:
                times = {"start": piece.start / RATE, "end": (piece.start + len(piece.samples)) / RATE}
                print(json.dumps({"file": str(file), **times, "text": text}, ensure_ascii=False))
        else:
            print(" ".join(text for _, text in own if text))
    return 1 if None in outputs else 0


def _read(file: Path) -> np.ndarray:
    from jaxllm.media.sound import at_rate, read_wav

    try:
        return at_rate(*read_wav(file.read_bytes()))
    except UserError as error:
        raise UserError(f"{file}: {error}", "file") from error


def cuts(samples: np.ndarray, longest: int) -> list[tuple[int, int]]:
    """Return starts and ends of pieces of at most `longest` samples, cut where the last sixth is quietest."""
    import numpy as np

    found, start = [], 0
    while len(samples) - start > longest:
        first = start + longest - int(longest * _SEARCHED)
        power = np.square(samples[first : start + longest])
        frames = power[: len(power) // _FRAME * _FRAME].reshape(-1, _FRAME).mean(axis=1)
        width = min(_QUIET, len(frames))
        means = np.convolve(frames, np.ones(width), "valid")
        end = first + (int(np.argmin(means)) + width // 2) * _FRAME
        found.append((start, end))
        start = end
    return [*found, (start, len(samples))] if len(samples) > start else found


def _transcribe(llm: LLM, pieces: Sequence[Piece], language: str | None, translates: bool) -> list[str | None]:
    model, settings = llm.engine.model, llm.engine.model.generation_config
    token_of = model.tokenizer.token_id
    begin = _required(token_of("<|startoftranscript|>"), "<|startoftranscript|>")
    end = _required(token_of("<|notimestamps|>"), "<|notimestamps|>")
    languages = _languages(settings)
    if language is not None and f"<|{language}|>" not in languages:
        known = ", ".join(sorted(name[2:-2] for name in languages)) or "none: the model has one language"
        raise UserError(f"--language {language} is not one of the model's: {known}.", "language")
    prompts: list[list[int]] = [[begin, end]] * len(pieces)
    if languages:
        chosen = {file: languages.get(f"<|{language}|>") for file in dict.fromkeys(piece.file for piece in pieces)}
        first = [next(piece for piece in pieces if piece.file == file) for file in chosen]
        if language is None:
            params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=list(languages.values()))
            outputs = llm.generate([_prompt(piece, [begin]) for piece in first], params, use_tqdm=False)
            chosen = {piece.file: output.outputs[0].token_ids[0] for piece, output in zip(first, outputs, strict=True)}
        name = "<|translate|>" if translates else "<|transcribe|>"
        work = _required(token_of(name), name)
        prompts = [[begin, _required(chosen[piece.file], "language"), work, end] for piece in pieces]
    elif translates:
        raise UserError("The model has one language and translates nothing; leave --translate out.", "translate")
    banned = [token for token in settings.get("suppress_tokens") or () if type(token) is int and token >= 0]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=None,
        min_tokens=1,
        logit_bias=dict.fromkeys(banned[:MAX_BIASED_TOKENS], -100.0) or None,
    )
    given = [_prompt(piece, ids) for piece, ids in zip(pieces, prompts, strict=True)]
    outputs = llm.generate(given, params, use_tqdm=sys.stderr.isatty())
    return [None if each.outputs[0].finish_reason == "error" else each.outputs[0].text.strip() for each in outputs]


def _languages(settings: Mapping[str, Any]) -> dict[str, int]:
    found = settings.get("lang_to_id") or {}
    return {name: token for name, token in found.items() if isinstance(name, str) and type(token) is int}


def _prompt(piece: Piece, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "encoder_prompt": {"multi_modal_data": {"audio": (piece.samples, RATE)}},
        "decoder_prompt": {"prompt_token_ids": list(ids)},
    }


def _required(token: int | None, name: str) -> int:
    if token is None:
        raise UserError(f"The tokenizer has no {name}; choose a model such as Whisper.", "model")
    return token
