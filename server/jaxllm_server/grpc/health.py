"""grpc.health.v1, and the names of the services whose health it reports. Knows no engine."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm.v1 import control_pb2, inference_pb2
from jaxllm_server.access.client_quota import Places, peer_of

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# A Watch needs no key and stays, at 17 KB of memory (measured). A load balancer has one or a few.
MAX_WATCHES = 1024
MAX_WATCHES_EACH = 64  # of one connection
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Status = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: answers from the last state that it was given, never from the engine.

    "" and the inference service serve while the engine does. The control service serves until the engine is dead: a
    paused or loading server must stay reachable for its operators.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed = asyncio.Event()  # replaced at each change, so that every watcher wakes once
        self._is_closed = False
        self._watches = Places("watches", MAX_WATCHES, MAX_WATCHES_EACH)
        self.set_state("loading")

    def set_state(self, state: str) -> None:
        """Follow a state of `AsyncLLM.state`; nothing follows `close`."""
        if self._is_closed:
            return
        inference = _SERVING if state == "serving" else _NOT_SERVING
        control = _NOT_SERVING if state in ("dead", "stopped") else _SERVING
        self._tell({"": inference, INFERENCE: inference, CONTROL: control})

    def close(self) -> None:
        """Serve nothing from now on, and end all watches once they have said so."""
        self._is_closed = True
        self._tell(dict.fromkeys(self._statuses, _NOT_SERVING))

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Answer for one service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no service of this name.")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        """Answer for all services. Registered by grpcio-health-checking where that knows the call: 1.81 does not."""
        response = health_pb2.HealthListResponse()  # pyright: ignore[reportAttributeAccessIssue]
        for name, status in self._statuses.items():
            response.statuses[name].status = status
        return response

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Answer for one service now and whenever that changes."""
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
