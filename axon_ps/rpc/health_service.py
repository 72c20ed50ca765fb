"""The standard health service with bounded watches: a caller needs no token, so it must not cost much memory."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.grpc import abort
from axon_ps.rpc.limits import MAX_WATCHES, WATCH_S
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import status_of


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """`grpc.health.v1.Health`, for the services of one server."""

    def __init__(self) -> None:
        super().__init__()
        self._watches = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Send the health of a service whenever it changes, for `WATCH_S`; a watch of an unknown service is refused."""
        if request.service not in self._server_status:
            unknown = f"this server has no service {request.service[:80]!r} to watch"
            await abort(context, status_of(InvalidRequest(unknown)))
        if self._watches >= MAX_WATCHES:
            full = f"{MAX_WATCHES} watches of this server's health are open, which is the most; ask with Check instead"
            await abort(context, status_of(Busy(full)))
        self._watches += 1
        try:
            async with asyncio.timeout(WATCH_S):
                await self._watch(request.service, context)
        except TimeoutError:
            lasts = f"a watch lasts {WATCH_S:g} s; begin another"
            await abort(context, CallStatus(grpc.StatusCode.UNAVAILABLE, lasts))
        finally:
            self._watches -= 1

    async def _watch(self, service: str, context: Any) -> None:
        """Send changes. Unlike in gRPC's service, a client that leaves or does not read never affects another."""
        changed = self._server_watchers[service]
        while True:
            status = self._server_status[service]
            await Shielded(context.write(health_pb2.HealthCheckResponse(status=status)))
            async with changed:
                await changed.wait_for(lambda status=status: self._server_status[service] != status)
