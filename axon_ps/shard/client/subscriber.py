"""A subscriber's client of the shard servers: it pulls versions of a model, each from all servers or not at all.

A subscriber is not a member. It asks the coordinator for the placement, and each shard server for its slices. See
`shard.core.publications`, Note: [A version that all servers have]. Everything here runs on one event loop.

Note: [A pull and its failures]
    Slices that have arrived are kept if another server fails. The pull goes on at the slice's new primary if it still
    has the version, and begins again with a newer version otherwise. The values are returned only once all have
    arrived.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from axon_ps.errors import (
    AxonError,
    Broken,
    Busy,
    Closed,
    InvalidRequest,
    Misuse,
    PermissionDenied,
    Timeout,
    Unreachable,
)
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.channels import Channel, connect
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub, together
from axon_ps.rpc.stream import EOF, Stream
from axon_ps.shard.client.assembly import ArrivingVersion, Values
from axon_ps.types import DType, Membership
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.events import JobState
from axon_ps.wire.frames import decode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2

Describe = Callable[[], Awaitable[tuple[JobState, Membership]]]
"""Asks the coordinator for the model and the members."""

_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Connection:
    address: str
    channel: Channel
    stream: Stream


class ModelSubscriber:
    """A client that pulls versions of one model.

    Args:
        describe: asks the coordinator for the model and the members.
        job: name of the job.
        security: TLS and token.
        dtype: dtype of the values; None = the job's wire dtype, or f32 if parameters are compressed.
        changes: whether servers send only the changed elements if these are few.
        connect_timeout_s: seconds after which a pull fails if no coordinator has answered; None = as long as for a
            version.

    Attributes:
        values: the version pulled last; None if there is none, or the model has another layout since.
        counters: pulls, failed attempts, versions given up, bytes and chunks received.
    """

    def __init__(
        self,
        describe: Describe,
        *,
        job: str,
        security: Security,
        dtype: DType | None = None,
        changes: bool = False,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.values: Values | None = None
        self.counters: Counter[str] = Counter()
        self._describe = describe
        self._job = job
        self._security = security.acting(Principal.OBSERVER, job)
        self._wanted_dtype = dtype
        self._changes = changes
        self._connect_timeout_s = connect_timeout_s
        self._answered = False  # True once a coordinator has answered
        self._model: JobState | None = None
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, _Connection] = {}

    async def close(self) -> None:
        """Close every connection. A repeated call is harmless."""
        for rank in list(self._connections):
            await self._disconnect(rank)

    async def pull(self, min_version: int, multiple_of: int, deadline: Deadline, *, exactly: bool = False) -> Values:
        """Return the newest version that is at least `min_version`, once there is one, or any version of a later epoch.

        Args:
            min_version: the oldest version accepted; -1 = any, of any epoch.
            multiple_of: versions must be multiples of this.
            deadline: the latest time.
            exactly: whether only `min_version` itself is accepted.

        Raises:
            Timeout: there was no version in time. The message has the last reason.
            Unreachable: no coordinator has ever answered at the address.
            InvalidRequest: `exactly` is set, and the version is not there any more.
            PermissionDenied: wrong token or job.
            Misuse: the model was released.

        After an error: `values` are unchanged, or None if the model has another layout.
        """
        attempt: ArrivingVersion | None = None
        pause_s, failure = _FIRST_PAUSE_S, "no version came"
        connecting, reminders = Deadline(self._connect_timeout_s), reminder_pauses()
        reminder = Deadline(next(reminders))
        try:
            async with asyncio.timeout(deadline.remaining()):
                while True:
                    try:
                        attempt = await self._attempt(attempt, min_version, multiple_of, exactly=exactly)
                        self.values = attempt.finish()
                        self.counters["pulls"] += 1
                        return self.values
                    except _Gone as gone:
                        attempt, failure = None, str(gone)
                        self.counters["versions_given_up"] += 1
                    except _Incomplete as incomplete:
                        attempt, failure = incomplete.attempt, str(incomplete)
                        if not self._answered and connecting.expired:
                            raise Unreachable(
                                f"{failure}; no coordinator answered within {connecting.timeout_s:g} s"
                            ) from None
                        if not self._answered and reminder.expired:
                            _logger.warning("no coordinator has answered yet: %s", failure)
                            reminder = Deadline(next(reminders))
                    self.counters["retries"] += 1
                    _logger.debug("a pull goes on: %s", failure)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            await self.close()
            raise Timeout(f"version {max(min_version, 0)} or later was not pulled in time: {failure}") from None

    async def _attempt(
        self, attempt: ArrivingVersion | None, min_version: int, multiple_of: int, *, exactly: bool
    ) -> ArrivingVersion:
        """Pull the missing slices of a version, or all of another version. It is complete on return.

        Raises:
            _Incomplete: slices are still missing.
            _Gone: another version must be pulled.
        """
        try:
            if self._model is None:
                await self._look_up()
            owners = self._owners(None if attempt is None else attempt.missing)
            if attempt is None:
                attempt = await self._begin(owners, min_version, multiple_of, exactly=exactly)
            else:
                await self._resume(owners, attempt)
        except (AxonError, OSError) as error:
            if self._is_final(error) or (exactly and isinstance(error, InvalidRequest) and self._model is not None):
                raise
            raise await self._incomplete(attempt, error) from error
        pulls = [self._pull(rank, numbers, attempt) for rank, numbers in owners.items()]
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        for failure in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
            if isinstance(failure, Busy):
                raise _Gone(str(failure))
            if not isinstance(failure, AxonError) or self._is_final(failure):
                raise failure
            raise await self._incomplete(attempt, failure)
        return attempt

    @staticmethod
    def _is_final(error: BaseException) -> bool:
        """Return True if another attempt is useless. After `Closed` of a connection, a kind of `Misuse`, it is not."""
        return isinstance(error, (PermissionDenied, Misuse)) and not isinstance(error, Closed)

    async def _incomplete(self, attempt: ArrivingVersion | None, error: BaseException) -> _Incomplete:
        """Return the error to raise after a failed attempt. The next attempt begins by looking up the placement."""
        self._model = None
        if attempt is None:  # a server may still be waiting for a version
            await self.close()
        return _Incomplete(attempt, str(error))

    async def _look_up(self) -> None:
        try:
            job, membership = await self._describe()
        except (Broken, Timeout):
            raise
        except AxonError:
            self._answered = True
            raise
        self._answered = True
        if job.spec is None or job.placement is None or not job.initialized:
            raise Busy("the shard servers do not have the model's parameters yet")
        self._model, self._addresses = job, {m.rank: m.address for m in membership.shards}
        if self.values is not None and self.values.spec != job.spec:
            self.values = None

    def _owners(self, numbers: Iterable[int] | None) -> dict[int, list[int]]:
        """Return the slices to be pulled from each server, by rank; None = all slices."""
        assert self._model is not None
        assert self._model.placement is not None
        holders = self._model.placement.holders
        owners: defaultdict[int, list[int]] = defaultdict(list)
        for number in sorted(range(len(holders)) if numbers is None else numbers):
            owners[holders[number].primary].append(number)
        return owners

    async def _begin(
        self, owners: dict[int, list[int]], min_version: int, multiple_of: int, *, exactly: bool
    ) -> ArrivingVersion:
        assert self._model is not None
        assert self._model.spec is not None
        assert self._model.placement is not None
        epoch = 0 if self.values is None or min_version < 0 else self.values.epoch
        reserve = shard_pb2.Reserve(
            dtype=dtype_to_proto(self._dtype), min_version=max(0, min_version), epoch=epoch, multiple_of=multiple_of
        )
        reserved = await together([self._reserve(rank, reserve) for rank in owners])
        chosen = max(reserved)
        if exactly and chosen[1] != min_version:
            raise InvalidRequest(f"version {min_version} is not there any more: the model is at version {chosen[1]}")
        values = self.values
        base = values if values is not None and values.epoch == chosen[0] and values.dtype is self._dtype else None
        return ArrivingVersion(self._model.spec, self._model.placement.num_cuts, self._dtype, *chosen, base)

    async def _resume(self, owners: dict[int, list[int]], attempt: ArrivingVersion) -> None:
        """Reserve the version at the present primaries of the missing slices.

        Raises:
            _Gone: one does not have it any more.
        """
        assert self._model is not None
        assert self._model.placement is not None
        if (self._model.spec, self._model.placement.num_cuts) != (attempt.spec, attempt.num_cuts):
            raise _Gone("the model has another layout")
        reserve = shard_pb2.Reserve(dtype=dtype_to_proto(self._dtype), min_version=attempt.version, epoch=attempt.epoch)
        reserved = await together([self._reserve(rank, reserve) for rank in owners])
        if any(one != (attempt.epoch, attempt.version) for one in reserved):
            raise _Gone(f"version {attempt.version} is not at the slices' new primary")

    @property
    def _dtype(self) -> DType:
        assert self._model is not None
        assert self._model.spec is not None
        precision = self._model.spec.precision
        own = DType.F32 if precision.param_compression is not None else precision.param
        return self._wanted_dtype or own

    # ------------------------------------------------------------------ one server

    async def _reserve(self, rank: int, reserve: shard_pb2.Reserve) -> tuple[int, int]:
        """Reserve versions at a server; returns epoch and number of the first one it retains."""
        stream = await self._stream(rank)
        header, _ = await self._ask(rank, stream, shard_pb2.SubscribeRequest(reserve=reserve))
        return header.epoch, header.version

    async def _pull(self, rank: int, numbers: list[int], attempt: ArrivingVersion) -> None:
        stream = await self._stream(rank)
        since = None if attempt.base is None else attempt.base.version
        pull = shard_pb2.Pull(
            version=attempt.version, epoch=attempt.epoch, slices=numbers, since=since, changes=self._changes
        )
        attempt.begin(numbers)
        try:
            header, payload = await self._ask(rank, stream, shard_pb2.SubscribeRequest(pull=pull))
            while header.numel:
                attempt.put(header, payload, numbers)
                self.counters["chunks_in"] += 1
                self.counters["bytes_in"] += payload.nbytes
                header, payload = await self._read(stream)
            attempt.arrived(numbers)
        except AxonError:
            await self._disconnect(rank)
            raise

    async def _ask(
        self, rank: int, stream: Stream, request: shard_pb2.SubscribeRequest
    ) -> tuple[common_pb2.Chunk, memoryview]:
        assert self._model is not None
        request.context.CopyFrom(common_pb2.CallContext(job=self._job, model=self._model.model))
        try:
            await stream.write(request)
            return await self._read(stream)
        except AxonError:
            await self._disconnect(rank)
            raise

    async def _read(self, stream: Stream) -> tuple[common_pb2.Chunk, memoryview]:
        message = await stream.read()
        if message is EOF:
            raise Broken(f"{stream.target} ended before everything had come")
        return decode_chunk(message)

    async def _stream(self, rank: int) -> Stream:
        """Return the open stream to a server; a new one if it has another address.

        Raises:
            Broken: it is not a member.
        """
        address = self._addresses.get(rank)
        if address is None:
            raise Broken(f"shard server {rank} is not there")
        known = self._connections.get(rank)
        if known is not None and known.address == address:
            return known.stream
        await self._disconnect(rank)
        channel = connect(address, self._security, to=Principal.SHARD)
        stream = Stub(channel, _SERVICE, self._security).open("Subscribe")
        self._connections[rank] = _Connection(address, channel, stream)
        return stream

    async def _disconnect(self, rank: int) -> None:
        if (known := self._connections.pop(rank, None)) is not None:
            known.stream.cancel()
            await known.channel.close()


class _Gone(Exception):
    """The version that is being pulled is not there any more."""


class _Incomplete(Exception):
    """Slices of a version are missing. Another attempt may get them."""

    def __init__(self, attempt: ArrivingVersion | None, reason: str) -> None:
        super().__init__(reason)
        self.attempt = attempt
