"""A client for operators: status, checkpoints and the key-value store without joining the job."""

from __future__ import annotations

from axon_ps.coordinator.client.calls import Calls
from axon_ps.rpc.channels import connect
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import common_pb2, coordinator_pb2

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
"""Descriptor of the coordinator's service."""


class OperatorClient(Calls):
    """The command line's client of a coordinator. Make, use and close it on one event loop.

    Args:
        address: "host:port" of the coordinator.
        security: TLS and token.
        job: name of the job; empty = the one that the coordinator runs.
    """

    retries = False

    def __init__(self, address: str, *, security: Security, job: str = "") -> None:
        self._job = job
        self._channel = connect(address, security)
        self._stub = Stub(self._channel, SERVICE, security.token)

    def context(self) -> common_pb2.CallContext:
        """Who calls: an operator has no incarnation."""
        return common_pb2.CallContext(job=self._job)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> OperatorClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connected(self, deadline: Deadline) -> Stub:
        return self._stub

    async def _reached(self, generation: int, deadline: Deadline) -> None:
        return None
