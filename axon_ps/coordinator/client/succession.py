"""The search for another leader by a member with a live session, which asks the other coordinators now and then.

A leader that is frozen or cut off does not end its sessions, and keepalive takes up to 15 s to detect it. The next
leader answers at once, and no coordinator answers while another one may lead (see `storage.state_store.base`). So if
two addresses answer, they belong to the same coordinator.
"""

from __future__ import annotations

import asyncio
from typing import Final

from axon_ps.coordinator.client.addresses import Addresses, Endpoint
from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.errors import AxonError
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import common_pb2, coordinator_pb2

ASK_S: Final = 0.5
"""Seconds between two questions to the others, and for their answers."""

AGAIN_S: Final = 0.2
"""Seconds that the present leader has to answer, too, when another coordinator does."""


async def successor(addresses: Addresses, security: Security, job: str) -> Endpoint:
    """Return the address of a leader other than the present one, as soon as there is one. It may be cancelled."""
    endpoints = list(addresses)
    channels = [addresses.connect_to(endpoint, security) for endpoint in endpoints]
    stubs = {endpoint: Stub(channel, SERVICE, security) for endpoint, channel in zip(endpoints, channels, strict=True)}
    present = stubs.pop(addresses.present)
    try:
        while True:
            await asyncio.sleep(ASK_S)
            answers = await asyncio.gather(*(_leads(stub, job, ASK_S) for stub in stubs.values()))
            leading = [endpoint for endpoint, leads in zip(stubs, answers, strict=True) if leads]
            if leading and not await _leads(present, job, AGAIN_S):
                return leading[0]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _leads(stub: Stub, job: str, timeout_s: float) -> bool:
    """Return True if a coordinator answers a call. A standby refuses every call."""
    context = common_pb2.CallContext(job=job)
    request = coordinator_pb2.KVRequest(context=context, op=coordinator_pb2.KV_OP_GET, key="leads")
    try:
        await stub.call("KV", request, timeout_s=timeout_s)
    except AxonError:
        return False
    return True
