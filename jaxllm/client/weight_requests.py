"""Requests of calls that sleep and update weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike, fspath
from typing import Any

from jaxllm.client.fields import set_field, shown
from jaxllm.client.requests import pause_mode_of
from jaxllm.errors import UserError
from jaxllm.v1 import control_pb2

PART_BYTES = 2 << 20  # of a tensor; servers take 8 MiB by default


def sleep_request(level: int, tags: Iterable[str] | None, mode: str) -> control_pb2.SleepRequest:
    request = control_pb2.SleepRequest(mode=pause_mode_of(mode))
    set_field(request, "level", "level", level)
    _set_tags(request, tags)
    return request


def wake_up_request(tags: Iterable[str] | None) -> control_pb2.WakeUpRequest:
    request = control_pb2.WakeUpRequest()
    _set_tags(request, tags)
    return request


def finish_request(weight_version: str | None) -> control_pb2.FinishWeightUpdateRequest:
    request = control_pb2.FinishWeightUpdateRequest()
    _set_version(request, weight_version)
    return request


def update_requests(
    weights: str | PathLike[str] | Mapping[str, Any], weight_version: str | None
) -> Iterator[control_pb2.UpdateWeightsRequest]:
    """Yield requests with a folder's path, or arrays; raise UserError for arrays with a version."""
    if isinstance(weights, str | PathLike):
        request = control_pb2.UpdateWeightsRequest()
        set_field(request, "path", "weights", fspath(weights))
        _set_version(request, weight_version)
        yield request
        return
    if not isinstance(weights, Mapping) or not weights:
        raise UserError(f"weights must be a folder, or arrays by name, got {shown(weights)}.", "weights", weights)
    if weight_version is not None:
        message = "finish_weight_update takes the version of an update in pieces."
        raise UserError(message, "weight_version", weight_version)
    for name, array in weights.items():
        yield from _parts(name, array)


def _parts(name: str, array: Any) -> Iterator[control_pb2.UpdateWeightsRequest]:
    try:
        dtype, shape, content = str(array.dtype), array.shape, memoryview(array.tobytes())
    except AttributeError:
        message = f"weights must be NumPy or JAX arrays, got {shown(array)} for {shown(name)}."
        raise UserError(message, "weights", array) from None
    for offset in range(0, max(1, len(content)), PART_BYTES):
        request = control_pb2.UpdateWeightsRequest()
        set_field(request, "tensor.name", "weights", name)
        request.tensor.dtype = dtype
        request.tensor.shape.extend(shape)
        request.tensor.offset = offset
        request.tensor.data = bytes(content[offset : offset + PART_BYTES])
        yield request


def _set_tags(request: Any, tags: Iterable[str] | None) -> None:
    if tags is not None:
        set_field(request, "tags", "tags", [tags] if isinstance(tags, str) else list(tags))


def _set_version(request: Any, weight_version: str | None) -> None:
    if weight_version is not None:
        set_field(request, "weight_version", "weight_version", weight_version)
