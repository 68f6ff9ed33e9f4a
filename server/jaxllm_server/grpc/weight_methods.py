"""Weight and sleep methods of `jaxllm.v1.ControlService`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from grpc.aio import ServicerContext

from jaxllm.checkpoints.checkpoint import FLOATS
from jaxllm.errors import UserError
from jaxllm.v1 import control_pb2
from jaxllm_server.shared import weight_calls

if TYPE_CHECKING:
    from jaxllm.engine.engine_client import EngineClient
    from jaxllm.engine.life_cycle import PauseMode
    from jaxllm_server.serving import Serving

_PAUSE_MODES: Mapping[int, PauseMode] = {
    control_pb2.PAUSE_MODE_UNSPECIFIED: "abort",
    control_pb2.PAUSE_MODE_ABORT: "abort",
    control_pb2.PAUSE_MODE_WAIT: "wait",
    control_pb2.PAUSE_MODE_KEEP: "keep",
}
_DTYPES = {dtype.name: dtype for dtype in FLOATS.values()}
_MAX_TAGS = 8
_MAX_NAME_CHARS = 512
_MAX_AXES = 8


class Described(NamedTuple):
    """Shape and type of a tensor to be received."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass
class Incoming:
    """A partly received tensor."""

    name: str
    described: Described
    values: np.ndarray  # uint8
    received: int = 0


class WeightMethods:
    """`ControlService`'s weight methods."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._incoming: Incoming | None = None  # at most the model's largest tensor

    async def Sleep(self, request: control_pb2.SleepRequest, context: ServicerContext) -> control_pb2.SleepResponse:
        level = request.level if request.HasField("level") else 1
        await self._engine().sleep(level, _tags(request.tags), mode=pause_mode_of(request.mode))
        return control_pb2.SleepResponse()

    async def WakeUp(self, request: control_pb2.WakeUpRequest, context: ServicerContext) -> control_pb2.WakeUpResponse:
        await self._engine().wake_up(_tags(request.tags))
        return control_pb2.WakeUpResponse()

    async def GetWeightInfo(
        self, request: control_pb2.GetWeightInfoRequest, context: ServicerContext
    ) -> control_pb2.GetWeightInfoResponse:
        engine = self._engine()
        return control_pb2.GetWeightInfoResponse(
            weight_version=await engine.get_weight_version(),
            is_sleeping=await engine.is_sleeping(),
            is_paused=engine.is_paused,
        )

    async def StartWeightUpdate(
        self, request: control_pb2.StartWeightUpdateRequest, context: ServicerContext
    ) -> control_pb2.StartWeightUpdateResponse:
        await self._engine().start_weight_update()
        self._incoming = None
        return control_pb2.StartWeightUpdateResponse()

    async def UpdateWeights(
        self, request: control_pb2.UpdateWeightsRequest, context: ServicerContext
    ) -> control_pb2.UpdateWeightsResponse:
        engine, source = self._engine(), request.WhichOneof("source")
        version = request.weight_version if request.HasField("weight_version") else None
        if source is None:
            raise UserError("give the path of a folder, or a part of a tensor.", "path")
        try:
            if source == "path":
                folder = weight_calls.weight_folder(self._serving.options, request.path, "path")
                self._incoming = None
                found = await engine.update_weights(folder, weight_version=version)
            elif version is not None:
                raise UserError("finish_weight_update takes the version of an update in pieces.", "weight_version")
            else:
                found = await self._take_in(engine, request.tensor)
        except UserError as error:
            error.parameter = source if error.parameter == "weights" else error.parameter
            raise
        return control_pb2.UpdateWeightsResponse(weight_version=found)

    async def FinishWeightUpdate(
        self, request: control_pb2.FinishWeightUpdateRequest, context: ServicerContext
    ) -> control_pb2.FinishWeightUpdateResponse:
        self._incoming = None
        version = request.weight_version if request.HasField("weight_version") else None
        found = await self._engine().finish_weight_update(version)
        return control_pb2.FinishWeightUpdateResponse(weight_version=found)

    def _engine(self) -> EngineClient:
        weight_calls.check_enabled(self._serving.engine.config)
        return self._serving.engine

    async def _take_in(self, engine: EngineClient, part: control_pb2.TensorPart) -> str:
        """Store a part; replace the weight after its last; return the version in use."""
        described = _described(part)
        if part.offset == 0:
            self._incoming = None
            await engine.check_piece({part.name: described})
            size = math.prod(described.shape) * described.dtype.itemsize
            self._incoming = Incoming(part.name, described, np.empty(size, np.uint8))
        own = self._incoming
        if own is None or (own.name, own.described, own.received) != (part.name, described, part.offset):
            place = "no part" if own is None else f"byte {own.received} of {own.name!r:.200}"
            raise UserError(f"the last part ended at {place}; send {part.name!r:.200} again from offset 0.", "tensor")
        end = own.received + len(part.data)
        if end > own.values.size or (not part.data and own.values.size):
            raise UserError(
                f"the part has {len(part.data)} bytes, {own.values.size - own.received} are left of {own.name!r:.200}.",
                "tensor",
            )
        own.values[own.received : end] = np.frombuffer(part.data, np.uint8)
        own.received = end
        if end < own.values.size:
            return await engine.get_weight_version()
        self._incoming = None
        return await engine.update_weights({own.name: own.values.view(described.dtype).reshape(described.shape)})


def pause_mode_of(mode: int) -> PauseMode:
    if mode not in _PAUSE_MODES:
        raise UserError(f"mode {mode} is not known.", "mode")
    return _PAUSE_MODES[mode]


def _tags(tags: Sequence[str]) -> list[str] | None:
    if len(tags) > _MAX_TAGS:
        raise UserError(f"there are at most {_MAX_TAGS} tags.", "tags")
    return list(tags) or None


def _described(part: control_pb2.TensorPart) -> Described:
    if len(part.name) > _MAX_NAME_CHARS or len(part.shape) > _MAX_AXES:
        raise UserError(
            f"a tensor's name has at most {_MAX_NAME_CHARS} characters, its shape {_MAX_AXES} axes.", "tensor"
        )
    dtype = _DTYPES.get(part.dtype)
    if dtype is None:
        raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, got {part.dtype[:80]!r}.", "tensor.dtype")
    return Described(tuple(part.shape), dtype)
