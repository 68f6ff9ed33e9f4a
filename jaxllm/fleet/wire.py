"""Messages between a front end and its replicas: msgpack lists of plain data and `CLASSES`.

A frame is a length of four bytes and a list of messages, which begin with their names. No other classes are decoded.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgpack
import numpy as np

from jaxllm import errors
from jaxllm.engine.features.table import SENT
from jaxllm.errors import EngineError, UserError
from jaxllm.metrics import DeviceReport, Load, Metrics, StepReport
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored

CLASSES: Mapping[str, type[Any]] = {
    one.__name__: one
    for one in (
        *(*SENT, SamplingParams, RepetitionDetectionParams, RequestOutputKind),
        *(CompletionOutput, Logprob, RequestMetrics, RequestOutput),
        *(DeviceReport, Load, Metrics, StepReport, AllBlocksCleared, BlockRemoved, BlockStored),
    )
}
_ERRORS = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
_TUPLE, _OBJECT, _ERROR, _ARRAY, _SET = range(1, 6)
MOST_BYTES = 1 << 30
_MOST_LEVELS = 32  # nested objects take 20 kB of stack each; ours have six levels
_LENGTH = struct.Struct("!I")


def pack(value: Any) -> bytes:
    return msgpack.Packer(default=_encoded, strict_types=True).pack(value)


def unpack(packed: bytes, level: int = 0) -> Any:
    """Decode a value; raise ValueError unless `pack` wrote it."""
    return msgpack.unpackb(packed, ext_hook=partial(_decoded, level + 1), strict_map_key=False)


def frame(messages: list[bytes]) -> bytes:
    """Join messages, packed separately so that failures affect one, into a frame."""
    packed = msgpack.Packer().pack_array_header(len(messages)) + b"".join(messages)
    return _LENGTH.pack(len(packed)) + packed


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """Wait for a frame; raise EOFError (IncompleteReadError) when the connection ends."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MOST_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return unpack(await reader.readexactly(size))


def _encoded(value: Any) -> Any:
    name = type(value).__name__
    if isinstance(value, Enum):
        return msgpack.ExtType(_OBJECT, pack([name, [value.value]]))
    if isinstance(value, tuple):
        if CLASSES.get(name) is type(value):
            return msgpack.ExtType(_OBJECT, pack([name, list(value)]))
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if is_dataclass(value) and CLASSES.get(name) is type(value):
        given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return msgpack.ExtType(_OBJECT, pack([name, given]))
    if isinstance(value, Exception):
        return msgpack.ExtType(_ERROR, pack([name, str(value), vars(value)]))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return msgpack.ExtType(_SET, pack(sorted(value)))
    raise TypeError(f"a {name} cannot be sent")


def _decoded(level: int, code: int, packed: bytes) -> Any:
    if level > _MOST_LEVELS:
        raise ValueError(f"objects within objects, more than {_MOST_LEVELS} deep")
    value = unpack(packed, level)
    return _DECODERS[code](value)


def _object(value: Any) -> Any:
    name, given = value
    return CLASSES[name](**given) if isinstance(given, dict) else CLASSES[name](*given)


def _error(value: Any) -> Exception:
    name, message, attributes = value
    kind = _ERRORS.get(name, EngineError)
    made = kind.__new__(kind)
    made.args = (message,)
    if issubclass(kind, UserError | EngineError):
        vars(made).update(attributes)
    return made


def _array(value: Any) -> np.ndarray:
    dtype, shape, raw = value
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


_DECODERS: Mapping[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _OBJECT: _object,
    _ERROR: _error,
    _ARRAY: _array,
    _SET: frozenset,
}
