"""A server's health, by grpc.health.v1."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub

SERVING = "SERVING"


def health_of(
    address: str,
    security: Security,
    *,
    service: str = "",
    timeout_s: float,
    name: str = "",
    to: Principal | None = None,
) -> Coroutine[Any, Any, str]:
    """Return the health that a server reports: `SERVING`, `NOT_SERVING`, `UNKNOWN` or `SERVICE_UNKNOWN`.

    Args:
        address: the server's address.
        security: TLS and token.
        service: full name of one service; empty = the entire server.
        timeout_s: seconds it may take.
        name, to: see `channels.connect`.

    Raises:
        AxonError: it does not answer, or refuses.
    """
    from grpc_health.v1 import health_pb2  # a worker never needs it

    async def ask() -> str:
        channel = connect(address, security, name=name, to=to)
        try:
            stub = Stub(channel, health_pb2.DESCRIPTOR.services_by_name["Health"], peer=address)
            reply = await stub.call("Check", health_pb2.HealthCheckRequest(service=service), timeout_s=timeout_s)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
        finally:
            await channel.close()

    return ask()
