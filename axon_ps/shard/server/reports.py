"""The interface that a server offers to the shells of its models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from axon_ps.errors import AxonError
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.observe.work import LongWork
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.server.capacity import Capacity
from axon_ps.shard.server.links import Links
from axon_ps.wire.events import Copied, Corrupted, Ready, SnapshotFile

T = TypeVar("T")


class Reports(Protocol):
    """The interface for reports to the coordinator. `coordinator.client.session.CoordinatorClient` has it.

    Attributes:
        rank: this server's number among the shard servers.
    """

    rank: int

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        """Report that every slice has all gradients, or those of `replica` if replicas step asynchronously."""

    def copied(self, copied: Copied) -> None:
        """Report the slices that have been copied to this server."""

    def corrupted(self, report: Corrupted) -> None:
        """Report that memory of a slice is corrupt."""

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        """Report that every slice of a model has its values."""

    def snapshot_report(self, id: int, files: tuple[SnapshotFile, ...] = (), error: AxonError | None = None) -> None:
        """Report this server's files of a checkpoint, or the error."""

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        """Report that this server could not restore a model."""

    def out_of_memory(self, model: int, placement: int, error: AxonError) -> None:
        """Report that there is not enough memory for the slices of a placement."""


class ServerShell(Protocol):
    """The part of the server's shell that a model's shell needs; see `shard.server.shell.ShardShell`.

    Attributes:
        reports: the way to the coordinator.
        links: the connections to the other shard servers; None if there are none.
        tracer: the spans of this process.
        capacity: the memory that the server may allocate.
        queue: the part of it for gradients that arrive out of order.
    """

    reports: Reports | None
    links: Links | None
    tracer: Tracer
    capacity: Capacity
    queue: QueueLimit

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine to its end, even if its caller is cancelled. If it raises, the server ends."""

    async def in_files_thread(self, work: Callable[[], Any]) -> Any:
        """Run slow work in the files' thread, after earlier work there."""

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run work on much memory in its thread. It is over when this returns, also after cancellation."""

    def working(self, kind: str) -> AbstractContextManager[LongWork]:
        """Show long work in this server's metrics while the context lasts."""

    def fail(self, error: BaseException) -> None:
        """End this server, which cannot go on."""

    def wake(self) -> None:
        """Wake callers after a change of a model that they may wait for."""
