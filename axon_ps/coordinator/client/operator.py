"""A client for operators: status, checkpoints and the key-value store without joining the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from axon_ps.coordinator.client.addresses import CONNECT_S, Addresses, Endpoint
from axon_ps.coordinator.client.calls import DEFAULT_TIMEOUT_S, NOT_BEGUN, RETRY_IDEMPOTENT, Calls
from axon_ps.coordinator.messages import job_from_proto
from axon_ps.errors import AxonError, Broken, Busy, Timeout, Unreachable
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.channels import Channel
from axon_ps.rpc.deadlines import Deadline, retry
from axon_ps.rpc.health import SERVING, health_of
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.stream import EOF, Stream
from axon_ps.types import Membership
from axon_ps.wire import codec
from axon_ps.wire.events import JobState
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, logs_pb2, revocation_pb2, trace_pb2, watch_pb2

DEFAULT_JOB: Final = "default"

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
"""Descriptor of the coordinator's service."""


SILENCE_S: Final = 5.0
"""A feed that is silent for this long is broken: a feed has an event every half second."""

AGAIN_S: Final = 0.5
"""Seconds before a broken feed is opened again."""


class OperatorClient(Calls):
    """The command line's client of a coordinator. Make, use and close it on one event loop.

    Args:
        address: "host:port" of the coordinator, or several with commas between them: the leader is called.
        security: TLS and token.
        job: name of the job; empty = the coordinator's.
        retries: whether calls are retried until their deadlines if that is safe. Otherwise they fail at once.

    Raises:
        ConfigurationError: an address is malformed.
    """

    def __init__(self, address: str, *, security: Security, job: str = "", retries: bool = False) -> None:
        self.retries = retries
        self._job = job
        self._security = security.acting(Principal.OPERATOR, job or DEFAULT_JOB)
        self._addresses = Addresses(address)
        self._connecting = asyncio.Lock()
        self._endpoint: Endpoint | None = None
        self._channel: Channel | None = None
        self._stub: Stub | None = None

    def context(self) -> common_pb2.CallContext:
        """Return the context of a call: an operator has no incarnation."""
        return common_pb2.CallContext(job=self._job)

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> OperatorClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def watch(self) -> AsyncGenerator[watch_pb2.WatchEvent | AxonError, None]:
        """Yield the job's events as they happen, until closed (`contextlib.aclosing`). It does not end by itself.

        Yields:
            Events of the feed, and each error that breaks it. An event that `begins` replaces all earlier ones. After
            an error the feed is opened again, at the coordinator that leads then.

        Raises:
            AxonError: another try is useless: the token is wrong, for example.
        """
        while True:
            try:
                stub = await self._connected(Deadline(CONNECT_S))
                async with stub.open("Watch") as stream:
                    await stream.write(watch_pb2.WatchRequest(context=self.context()))
                    while (message := await _next(stream)) is not EOF:
                        yield watch_pb2.WatchEvent.FromString(message)
                yield Broken("the coordinator has ended the feed")
            except TimeoutError as error:
                yield error if isinstance(error, Timeout) else Broken(f"the coordinator was silent for {SILENCE_S:g} s")
            except (Broken, Busy) as error:
                yield error
            await asyncio.sleep(AGAIN_S)

    async def revoke(
        self, target: str, reason: str = "", timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> revocation_pb2.RevokeReply:
        """Revoke credentials everywhere in the job. A member that had them is lost within a second.

        Args:
            target: the id of a token, the serial number of a certificate, or a member: "worker/3".
            reason: the text for refused callers.
            timeout_s: seconds it may take.

        Raises:
            InvalidRequest: there is no such member, it has no credentials of its own, or target or reason is malformed.
            Busy: too many names are revoked.
        """
        request = revocation_pb2.RevokeRequest(context=self.context(), target=target, reason=reason)
        reply: revocation_pb2.RevokeReply = await self._call(
            "Revoke", lambda: request, Deadline(timeout_s), again=RETRY_IDEMPOTENT
        )
        return reply

    async def trace(self, first: int, steps: int, timeout_s: float, *, model: str = "") -> trace_pb2.TraceReply:
        """Have all members record the spans of steps, and return them when these are over.

        Args:
            first: the first step attempt; 0 = the next that has not begun.
            steps: the number of steps.
            timeout_s: seconds to wait for them.
            model: name of the model; empty = the only one.

        Raises:
            InvalidRequest: there is no such model, the first step has begun, or there are too many steps.
            Timeout: the steps were not made in time. The message has the reason.
        """
        deadline = Deadline(timeout_s)
        request = trace_pb2.TraceRequest(
            context=self.context(), model=model, first=first, steps=steps, timeout_s=timeout_s
        )
        reply: trace_pb2.TraceReply = await self._call("Trace", lambda: request, deadline, again=NOT_BEGUN, waits=True)
        return reply

    async def describe(self, name: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> tuple[JobState, Membership]:
        """Return a model with its layout and placement, and the members.

        Args:
            name: of the model; empty = the only one.
            timeout_s: seconds that it may take.

        Raises:
            InvalidRequest: the job does not have it (yet).
        """
        request = coordinator_pb2.DescribeRequest(context=self.context(), name=name)
        reply = await self._call("Describe", lambda: request, Deadline(timeout_s), again=RETRY_IDEMPOTENT)
        return job_from_proto(reply.job), codec.membership_from_proto(reply.membership)

    async def logs(self, history: str = "", after: float = 0.0, wait_s: float = 0.0) -> logs_pb2.LogsReply:
        """Return a page of the lines that the job's processes have logged.

        Args:
            history: of the previous reply; empty = none.
            after: the number of its last record; 0 = none.
            wait_s: seconds to wait for a record if there is none; 10 at most.
        """
        request = logs_pb2.LogsRequest(context=self.context(), history=history, after=after, wait_s=wait_s)
        reply: logs_pb2.LogsReply = await self._call("Logs", lambda: request, Deadline(wait_s + SILENCE_S), again=())
        return reply

    async def _connected(self, deadline: Deadline) -> Stub:
        again = (Unreachable,) if self.retries else ()
        return await retry(self._connect, until=deadline, on=again)

    async def _connect(self) -> Stub:
        async with self._connecting:
            if self._stub is None:
                await self._addresses.look_up()
            endpoint = await self._leader() if len(self._addresses) > 1 else self._addresses.present
            if self._stub is None or endpoint != self._endpoint:
                await self.close()
                self._endpoint, self._channel = endpoint, self._addresses.connect_to(endpoint, self._security)
                self._stub = Stub(self._channel, SERVICE, self._security)
            return self._stub

    async def _leader(self) -> Endpoint:
        """Return the address of the leader, else of a standby, which refuses calls and names the leader.

        Raises:
            AxonError: the error of the first coordinator, if none answers.
        """
        endpoints = list(self._addresses)
        asked = (
            health_of(
                p.address,
                self._security,
                service=SERVICE.full_name,
                timeout_s=CONNECT_S,
                name=p.name,
                to=Principal.COORDINATOR,
            )
            for p in endpoints
        )
        answers = dict(zip(endpoints, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        answering = [endpoint for endpoint, health in answers.items() if isinstance(health, str)]
        for error in answers.values():
            if isinstance(error, BaseException) and not answering:
                raise error
        return next((endpoint for endpoint in answering if answers[endpoint] == SERVING), answering[0])

    async def _reached(self, generation: int, deadline: Deadline) -> None:
        return None


async def _next(stream: Stream) -> Any:
    """Return the next message. (Before Python 3.12, `wait_for` loses a cancellation that comes together with it.)"""
    async with asyncio.timeout(SILENCE_S):
        return await stream.read()
