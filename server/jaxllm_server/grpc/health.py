"""The grpc.health.v1 service."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm.v1 import control_pb2, inference_pb2
from jaxllm_server.access.client_quota import CallLimit, peer_of

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# A Watch needs no key and holds 17 KB (measured).
MAX_WATCHES = 1024
MAX_WATCHES_EACH = 64  # per connection
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Status = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):
    """Reports the last state set.

    "" and the inference service follow the engine. The control service is healthy until the engine is dead, for
    operators of a paused or loading server.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed = asyncio.Event()  # replaced at each change: every watcher wakes once
        self._is_closed = False
        self._watches = CallLimit("watches", MAX_WATCHES, MAX_WATCHES_EACH)
        self.set_state("loading")

    def set_state(self, state: str) -> None:
        """Report a state of `AsyncLLM.state`, unless closed."""
        if self._is_closed:
            return
        inference = _SERVING if state == "serving" else _NOT_SERVING
        control = _NOT_SERVING if state in ("dead", "stopped") else _SERVING
        self._tell({"": inference, INFERENCE: inference, CONTROL: control})

    def close(self) -> None:
        self._is_closed = True
        self._tell(dict.fromkeys(self._statuses, _NOT_SERVING))

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Unknown service.")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        """Return all statuses; only grpcio-health-checking above 1.81 registers this."""
        response = health_pb2.HealthListResponse()  # pyright: ignore[reportAttributeAccessIssue]
        for name, status in self._statuses.items():
            response.statuses[name].status = status
        return response

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        sent: Status | None = None
        with self._watches.place(peer_of(context.peer())):
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                if self._is_closed:
                    return
                await changed.wait()

    def _tell(self, statuses: dict[str, Status]) -> None:
        self._statuses = statuses
        self._changed.set()
        self._changed = asyncio.Event()
