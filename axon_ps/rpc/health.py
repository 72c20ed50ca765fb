"""A server's health, by grpc.health.v1."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub

SERVING = "SERVING"


async def health_of(
    address: str,
    security: Security,
    *,
    service: str = "",
    timeout_s: float,
    name: str = "",
    to: Principal | None = None,
) -> str:
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
    schema = health_pb2.DESCRIPTOR.services_by_name["Health"]
    channel = connect(address, security, name=name, to=to)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await Stub(channel, schema, peer=address).call("Check", request, timeout_s=timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    finally:
        await channel.close()
