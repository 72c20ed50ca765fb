"""The interface of a server to the shell of a model that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from axon_ps.errors import AxonError
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.observe.work import Work
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.server.capacity import Capacity
from axon_ps.shard.server.links import Links
from axon_ps.wire.events import Copied, Corrupted, Ready, SnapshotFile

T = TypeVar("T")


class Reports(Protocol):
    """The reports of a shard server to the coordinator; `coordinator.client.session.CoordinatorClient` is one.

    Attributes:
        rank: our number among the shard servers.
    """

    rank: int

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        """Every slice has every replica's gradients, or those of `replica` where replicas step asynchronously."""

    def copied(self, copied: Copied) -> None:
        """We have got slices that we were to copy."""

    def corrupted(self, report: Corrupted) -> None:
        """Memory of a slice does not hold what was written to it."""

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        """Every slice of a model has its values."""

    def snapshot_report(self, id: int, files: tuple[SnapshotFile, ...] = (), error: AxonError | None = None) -> None:
        """Our files of a checkpoint are written, or why not."""

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        """We could not restore a model."""

    def out_of_memory(self, model: int, placement: int, error: AxonError) -> None:
        """We have no memory for the slices of a model that a placement gives us."""


class ServerShell(Protocol):
    """The needs of a model's shell of its server's; see `shard.server.shell.ShardShell`.

    Attributes:
        reports: the way to the coordinator.
        links: the way to the other shard servers; None where there are none.
        tracer: the spans of this process.
        capacity: the memory that it has.
        queue: of it, for gradients that come before their turn.
    """

    reports: Reports | None
    links: Links | None
    tracer: Tracer
    capacity: Capacity
    queue: QueueLimit

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something, whoever waits for it; if it raises, the server ends."""

    async def in_files_thread(self, work: Callable[[], Any]) -> Any:
        """Do something slow in the thread for that, after what was given to it before."""

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do something to much memory in the thread for that; it is over when this returns, also when cancelled."""

    def working(self, kind: str) -> AbstractContextManager[Work]:
        """Long work, shown in our measures as long as the context lasts."""

    def fail(self, error: BaseException) -> None:
        """This server cannot go on."""

    def wake(self) -> None:
        """Something about a model changed that callers wait for."""
