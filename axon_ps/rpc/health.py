"""A server's health, as it answers by grpc.health.v1."""

from __future__ import annotations

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
    """The health that a server reports: `SERVING`, `NOT_SERVING`, `UNKNOWN` or `SERVICE_UNKNOWN`.

    Args:
        address: the server's.
        security: TLS and token.
        service: full name of one service; empty = the server as a whole.
        timeout_s: seconds it may take.
        name, to: as of `channels.connect`.

    Raises:
        AxonError: it does not answer, or refuses.
    """
    from grpc_health.v1 import health_pb2  # only who asks needs it: a worker never does

    schema = health_pb2.DESCRIPTOR.services_by_name["Health"]
    channel = connect(address, security, name=name, to=to)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await Stub(channel, schema, peer=address).call("Check", request, timeout_s=timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    finally:
        await channel.close()
