"""The service of a model's versions to subscribers. The choice of retained versions is `shard.core.publications`'s.

A version without frames is encoded in a thread, under a pin: a step that would change it is applied only after that
(see `shard.server.apply`, Note: [Apply and copy]). Steps are usually so long that none is delayed.

Note: [Subscribers give way]
    Gathers of the job's workers have priority over subscribers. A chunk for a subscriber is held back while a gather is
    being answered, for at most `GIVE_WAY_S`. Chunks for all subscribers are written for at most half of the time, and
    at most at the configured rate. So at most one chunk of each subscriber is ahead of a gather.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest, SliceMoved, Timeout
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.stream import EOF
from axon_ps.rpc.stream_pool import IdleStreams
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.publications import Publication, Publications, Subscriber, Wish
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.apply import Pin, VersionPins
from axon_ps.shard.server.corruption import Corruptions
from axon_ps.shard.server.waiters import Waiters
from axon_ps.types import parse_dtype
from axon_ps.wire.codec import dtype_from_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2

DUTY_CYCLE = 0.5
"""The largest fraction of time in which chunks for subscribers are written."""

GIVE_WAY_S = 0.05
"""Most seconds for which a chunk is held back for gathers."""

_LOOK_S = 0.002


@dataclass(frozen=True, kw_only=True)
class SubscriberLimits:
    """The limits of subscribers of a shard server.

    Attributes:
        rate_bytes_s: bytes per second for all of them together.
        max_bytes: memory for versions that are retained for them, per model.
        retain_s: seconds for which a version is retained for an idle subscriber; also the time limit of a write.
    """

    rate_bytes_s: float = math.inf
    max_bytes: float = 1 << 30
    retain_s: float = 60.0


class Pacer:
    """The schedule of chunks for subscribers.

    Args:
        limits: the rate, and the time limit of a write.

    Attributes:
        gathers: number of gathers being answered.
    """

    def __init__(self, limits: SubscriberLimits) -> None:
        self._limits = limits
        self.gathers = 0
        self._free_s = 0.0

    async def write(self, write: Callable[[bytes], Any], frame: bytes) -> None:
        """Write a frame when the schedule permits. See Note: [Subscribers give way].

        Raises:
            Timeout: the subscriber does not read.
        """
        until_s = time.monotonic() + GIVE_WAY_S
        while (left_s := max(self._free_s, self.gathers and until_s) - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _LOOK_S) if self.gathers else left_s)
        began_s = time.monotonic()
        self._free_s = began_s + len(frame) / self._limits.rate_bytes_s
        try:
            async with asyncio.timeout(self._limits.retain_s):
                await write(frame)
        except TimeoutError:
            raise Timeout(f"a subscriber did not read for {self._limits.retain_s:g} s") from None
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s + (now_s - began_s) * (1 / DUTY_CYCLE - 1))


class PublishedModel(Protocol):
    """The part of a model that subscriptions need.

    Attributes:
        engine: its slices.
        pins: versions that are still read.
        corruptions: the handling of corrupt memory.
    """

    corruptions: Corruptions
    engine: ShardEngine
    pins: VersionPins

    @property
    def published(self) -> tuple[int, int] | None:
        """Epoch and version of the values; None while they are changing."""

    def pin_for_copy(self, version: int) -> Pin:
        """Keep each slice at `version`."""

    def unpin_copy(self, pin: Pin) -> None:
        """Release the pin of `pin_for_copy`."""

    def check_released(self) -> None:
        """Check that the model was not released."""


class Subscriptions:
    """The subscribers of one model.

    Args:
        model: the model.
        limits: limits of memory and time.
    """

    def __init__(self, model: PublishedModel, limits: SubscriberLimits) -> None:
        self._model = model
        self._publications = Publications(limits.max_bytes, limits.retain_s, model.engine.counters)
        self._waiters = Waiters()
        self._thread: ThreadPoolExecutor | None = None
        self._encoding: set[asyncio.Future[None]] = set()
        self._subscribers = 0
        self._at = 0, -1  # epoch and version last published

    def wake(self) -> None:
        """Retain the present version for its subscribers, after the model has changed."""
        if not self._subscribers:
            return
        corrupt = any(owned.corrupt for owned in self._model.engine.slices.primaries)
        if (at := self._model.published) is not None and not corrupt:
            self._publish(*at)
        self._waiters.wake_all()

    def close(self) -> None:
        """End the thread after its current work."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def subscriber(self) -> AsyncIterator[Subscriber]:
        """Add a subscriber for the lifetime of its stream."""
        subscriber = Subscriber()
        self._publications.add(subscriber)
        self._subscribers += 1
        try:
            yield subscriber
        finally:
            self._subscribers -= 1
            self._publications.remove(subscriber)

    async def reserve(self, subscriber: Subscriber, wish: Wish) -> tuple[int, int]:
        """Retain versions for a subscriber; returns epoch and version of the first, once there is one.

        Raises:
            Misuse: the model was released.
        """
        await self._in_thread(cast.warm_up, wish.dtype)  # it may compile, which must not delay a step
        self._publications.reserve(subscriber, wish)
        self.wake()
        while not subscriber.reserved:
            await self._waiters.wait()
            self._model.check_released()
        return subscriber.reserved[0].key[:2]

    async def chosen(self, subscriber: Subscriber, epoch: int, version: int) -> Publication:
        """Return a version that a subscriber has reserved, once it is encoded.

        Raises:
            Busy: it is not retained.
            Misuse: the model was released.
        """
        while True:
            self._model.check_released()
            publication = self._publications.choose(subscriber, epoch, version, self._at)
            if publication is not None and publication.complete:
                return publication
            await self._waiters.wait()

    async def compare(self, subscriber: Subscriber, publication: Publication, since: int) -> None:
        """Encode the changes from the subscriber's last version to a publication, if that version is still retained."""
        base = subscriber.base
        if base is not None and base.key[1] == since and base.key[2] is publication.key[2] and base.complete:
            await self._in_thread(self._encode_changes, publication, base)

    def done(self, subscriber: Subscriber, *, compare: bool) -> None:
        """Record that a subscriber has received its version."""
        self._publications.done(subscriber, compare=compare)

    def _publish(self, epoch: int, version: int) -> None:
        if epoch != self._at[0]:
            self._publications.clear()
        self._at = epoch, version
        engine = self._model.engine
        precision = engine.precision
        own_dtype = None if precision.param_compression is not None else precision.param
        slices = engine.slices.primaries
        for made, lacking in self._publications.publish(epoch, version, slices, own_dtype, time.monotonic()):
            task = asyncio.ensure_future(self._encode(made, lacking, self._model.pin_for_copy(version)))
            self._encoding.add(task)
            task.add_done_callback(self._encoding.discard)

    async def _encode(self, publication: Publication, lacking: list[OwnedSlice], pin: Pin) -> None:
        try:
            await self._in_thread(self._encode_slices, publication, lacking, pin)
        except SliceMoved:
            self._publications.give_way(publication)
        finally:
            self._model.unpin_copy(pin)
            for owned in lacking:
                self._model.corruptions.report(owned)
            self._waiters.wake_all()

    def _encode_slices(self, publication: Publication, lacking: list[OwnedSlice], pin: Pin) -> None:
        for owned in lacking:
            if publication.dropped:
                return
            self._model.engine.counters["published_encodings"] += publication.encode(owned)
            self._model.pins.advance(pin, owned.number)

    def _encode_changes(self, publication: Publication, base: Publication) -> None:
        if not (publication.has_changes(base) or publication.dropped or base.dropped):
            publication.encode_changes(base)
            self._model.engine.counters["published_comparisons"] += 1

    async def _in_thread(self, work: object, *args: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "axon-ps-publish")
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)  # type: ignore[arg-type]


class Observed(Protocol):
    """The part of the server's fence that `serve` needs."""

    def observed(self, context: common_pb2.CallContext) -> tuple[Subscriptions, ShardEngine]:
        """Return the subscriptions to a model, and its engine, for a caller that need not be a member."""


async def serve(fence: Observed, pacer: Pacer, idle: IdleStreams, context: ServerCall) -> None:
    """Serve one subscription: `reserve` and `pull` alternate until the stream ends."""
    request = await idle.next(context)
    if request is EOF:
        return
    subscriptions, engine = fence.observed(request.context)
    async with subscriptions.subscriber() as subscriber:
        while request is not EOF:
            kind = request.WhichOneof("request")
            if kind == "reserve":
                epoch, version = await subscriptions.reserve(subscriber, _wish(request.reserve))
                await context.write(encode_chunk(common_pb2.Chunk(version=version, epoch=epoch), None))
            elif kind == "pull":
                await _send(pacer, subscriptions, engine, subscriber, request.pull, context)
            else:
                raise InvalidRequest("a subscriber sends reserve or pull; this is neither")
            request = await idle.next(context)


async def _send(
    pacer: Pacer,
    subscriptions: Subscriptions,
    engine: ShardEngine,
    subscriber: Subscriber,
    pull: shard_pb2.Pull,
    context: ServerCall,
) -> None:
    publication = await subscriptions.chosen(subscriber, pull.epoch, pull.version)
    since = pull.since if pull.HasField("since") else -1
    if missing := [number for number in pull.slices if number not in publication.changed]:
        raise SliceMoved(f"this shard server was not the primary of slice {missing[0]} at version {pull.version}")
    if pull.changes and since >= 0:
        await subscriptions.compare(subscriber, publication, since)
    engine.counters["published_pulls"] += 1
    for number in pull.slices:
        index = 0
        while index < len(frames := publication.frames_since(number, since, changes=pull.changes)):
            await pacer.write(context.write, frames[index])
            engine.counters["published_chunks_out"] += 1
            engine.counters["published_bytes_out"] += len(frames[index])
            index += 1
    subscriptions.done(subscriber, compare=pull.changes)
    await context.write(encode_chunk(common_pb2.Chunk(version=pull.version, epoch=pull.epoch), None))


def _wish(reserve: shard_pb2.Reserve) -> Wish:
    return Wish(
        dtype=parse_dtype(dtype_from_proto(reserve.dtype), "the wire dtype of parameters"),
        epoch=reserve.epoch,
        min_version=reserve.min_version,
        multiple_of=max(1, reserve.multiple_of),
    )
