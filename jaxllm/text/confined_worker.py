"""The worker process of confinement.py: executes tasks from standard input.

Must start quickly: no JAX, no numpy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from jaxllm.errors import UserError
from jaxllm.limited_process import TOO_MUCH_MEMORY
from jaxllm.media.image_part import marked_parts
from jaxllm.text.confinement import LOAD_SECONDS, MOST_KEPT, TOO_DEEP, Source
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.text.tokenizer_files import digest_of

_MOST_TOKEN = 4096  # bytes; published tokens reach 512
_MOST_VOCABULARY = 32 * 2**20  # bytes


def main() -> None:
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for descriptor in (0, 1):
        os.dup2(2, descriptor)  # library output is not a result
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    kept: OrderedDict[Source, Tokenizer] = OrderedDict()
    while head := tasks.read(16):
        seconds = int.from_bytes(head[8:]) / 1000
        _write(answers, _answer(tasks.read(int.from_bytes(head[:8])), seconds, kept))


def _answer(frame: bytes, seconds: float, kept: OrderedDict[Source, Tokenizer]) -> dict[str, Any]:
    """Run the method that a frame names; return its "value", the "error" to raise, or how it "failed".

    `kept` caches tokenizers.
    """
    try:
        signal.setitimer(signal.ITIMER_PROF, LOAD_SECONDS)
        folder, digest, method, arguments, named = json.loads(frame.decode("utf-8", "surrogatepass"))
        source = Source(folder, bytes.fromhex(digest))
        tokenizer = kept.pop(source, None)
        if tokenizer is None:
            if len(kept) >= MOST_KEPT:
                kept.popitem(last=False)
            tokenizer = _load(source)
        kept[source] = tokenizer
        signal.setitimer(signal.ITIMER_PROF, seconds)
        function = FUNCTIONS.get(method)
        if function is not None:
            return {"value": function(tokenizer, *arguments, **named)}
        return {"value": getattr(tokenizer, method)(*arguments, **named)}
    except UserError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"failed": TOO_MUCH_MEMORY}
        return {"error": [type(error).__name__, str(error), _plain(vars(error))]}
    except MemoryError:
        return {"failed": TOO_MUCH_MEMORY}
    except RecursionError:
        return {"error": ["UserError", TOO_DEEP, {"parameter": "messages"}]}
    except Exception as error:
        return {"failed": f"failed with {type(error).__name__}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _load(source: Source) -> Tokenizer:
    if source.digest and digest_of(Path(source.folder)) != source.digest:
        raise UserError("The files of this adapter have changed since it was loaded; load it again.", "model")
    return load_tokenizer(source.folder)


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    try:
        packed = msgpack.packb(answer, unicode_errors="surrogatepass")
    except MemoryError:
        packed = msgpack.packb({"failed": TOO_MUCH_MEMORY})
    assert packed is not None
    answers.write(len(packed).to_bytes(8) + packed)
    answers.flush()


def _identity(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"fingerprint": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}


def _vocabulary(tokenizer: Tokenizer, width: int) -> dict[str, Any]:
    tokens, pieces, length = [], list[Any](), 0
    for token_id in range(width):
        tokens.append(tokenizer.token(token_id))
        pieces.append(tokenizer.piece(token_id))
        read = len(pieces[-1]) if isinstance(pieces[-1], bytes) else max(len(text.encode()) for text in pieces[-1])
        length += read + len(tokens[-1])
        if read > _MOST_TOKEN or length > _MOST_VOCABULARY:
            raise UserError(f"its tokenizer writes too long a text for token {token_id}.", "lora_request")
    return {
        "tokens": tokens,
        "pieces": pieces,
        "added_ids": sorted(tokenizer.added_ids),
        "special_ids": sorted(tokenizer.special_ids),
        "named_tokens": dict(tokenizer.named_tokens),
        "decoding": asdict(tokenizer.decoding),
        "lengths": tokenizer.lengths(),
    }


def _shape(tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    shape = asdict(tokenizer.template_shape(source, None))
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in shape.items()}


def _encode_chat(tokenizer: Tokenizer, messages: Any, places: list[list[int]], **named: Any) -> tuple[str, list[int]]:
    return tokenizer.encode_chat(marked_parts(messages, places), **named)


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, str | int | None)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "identity": _identity,
    "vocabulary": _vocabulary,
    "shape": _shape,
    "encode_chat": _encode_chat,
}
