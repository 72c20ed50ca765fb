"""A host's session with the leading coordinator. When it breaks, it is opened again with the next leader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from axon_ps.coordinator.client.addresses import Addresses, Endpoint
from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.client.succession import successor
from axon_ps.errors import AxonError, Broken, Busy, Closed, Unreachable
from axon_ps.rpc.multiplex.client import MultiplexedClient
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import Stream
from axon_ps.wire.v1 import common_pb2, coordinator_pb2

RENEW_S: Final = 1.0
"""Seconds between two checks for newer credentials."""

LONGEST_PAUSE_S: Final = 1.0
"""Most seconds between two attempts to open it."""

BEGIN_S: Final = 5.0
"""Seconds that a coordinator may take to accept it."""

_logger = logging.getLogger(__name__)


class Upstream:
    """One host's session. Call `run` once.

    Args:
        address: "host:port" of the coordinator, or several with commas between them.
        job: name of the job.
        security: TLS and token, acting as a member of any rank.
        on_change: called with True when there is a session, and False when there is none.
    """

    def __init__(
        self, address: str, job: str, security: Security, on_change: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._addresses = Addresses(address)
        self._job = job
        self._security = security
        self._on_change = on_change
        self._calls: MultiplexedClient | None = None
        self._error: AxonError = Unreachable(f"there was no session with coordinator {address} yet")
        self._id = uuid.uuid4().hex
        self._random = random.Random()

    def calls(self) -> MultiplexedClient:
        """Return the client that makes calls on the present session.

        Raises:
            Unreachable: there is none.
        """
        if self._calls is None:
            where = self._addresses.present.address
            raise Unreachable(f"this host has no session with the coordinator at {where}: {self._error}")
        return self._calls

    async def run(self) -> None:
        """Keep a session open until cancelled.

        Raises:
            AxonError: the coordinator refuses it, so that another attempt would be in vain.
        """
        pause_s = 0.05
        while True:
            leads: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
            try:
                await self._session(leads)
            except (Broken, Busy) as error:
                if self._calls is not None:
                    _logger.warning("this host has lost its session with the coordinator: %s", error)
                    pause_s = 0.05
                self._calls, self._error = None, error
            await self._on_change(False)
            if not await self._addresses.next(leads.result() if leads.done() else None):
                await asyncio.sleep(self._random.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _session(self, leads: asyncio.Future[Endpoint]) -> None:
        """Run one session to its end. `leads` gets the address of another leader, if that ended it.

        Raises:
            Broken: it broke, could not be opened, or another coordinator leads.
            AxonError: it was refused.
        """
        channel = self._addresses.connect(self._security)
        beside: list[asyncio.Task[None]] = []
        try:
            await self._addresses.until_connected(channel)
            stub = Stub(channel, SERVICE, self._security)
            stream = stub.open("HostSession")
            beside.append(asyncio.create_task(self._renew(stub)))
            if len(self._addresses) > 1:
                beside.append(asyncio.create_task(self._follow(stream, leads)))
            await self._run(MultiplexedClient(stream, stub.peer, self._id))
        except Closed as error:
            why = f"another coordinator leads, at {leads.result().address}" if leads.done() else str(error)
            raise Broken(why) from None
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await channel.close()

    async def _run(self, calls: MultiplexedClient) -> None:
        running = asyncio.create_task(calls.run())
        try:
            async with asyncio.timeout(BEGIN_S):
                await calls.began()
            self._addresses.found()
            self._calls = calls
            _logger.info("this host has a session with the coordinator at %s", calls.peer)
            await self._on_change(True)
            await asyncio.wait([running])
            running.result()
        except TimeoutError:
            raise Broken(f"{calls.peer} did not answer within {BEGIN_S:g} s") from None
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _renew(self, stub: Stub) -> None:
        """Send the coordinator newer credentials when there are any: the session ends when the known ones expire."""
        known = stub.credentials()
        context = common_pb2.CallContext(job=self._job, incarnation=self._id)
        request = coordinator_pb2.KVRequest(context=context, op=coordinator_pb2.KV_OP_GET, key="any")
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(AxonError):  # there is no such member, or the next try succeeds
                if (newest := stub.credentials()) != known:
                    known = newest
                    await stub.call("KV", request, timeout_s=BEGIN_S)

    async def _follow(self, stream: Stream, leads: asyncio.Future[Endpoint]) -> None:
        leads.set_result(await successor(self._addresses, self._security, self._job))
        stream.cancel()
