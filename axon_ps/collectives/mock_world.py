"""Worlds of threads: what `World` offers to collectives, in one process and without any server.

Owns: `MockWorld`, one per thread. Refuses: parameters, steps and checkpoints, which need servers; use
`axon_ps.testing.LocalCluster` for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from axon_ps.collectives.backend import Backend, GroupContext
from axon_ps.collectives.group import ProcessGroup
from axon_ps.collectives.mock import MockBackend
from axon_ps.collectives.recorder import Recorder
from axon_ps.collectives.store import AbortableStore

TIMEOUT_S = 60.0


class MockWorld:
    """One thread's place among `world_size` threads. Made by `World.mock(n)`; a context manager.

    Attributes:
        default_group: all of them.
        recorder: the last collectives of this one.
    """

    def __init__(self, backend: MockBackend, timeout_s: float) -> None:
        self.recorder = Recorder()
        self.default_group = ProcessGroup(
            backend.context,
            lambda context, _: self._make(backend, context),
            timeout_s=timeout_s,
            recorder=self.recorder,
            backend="mock",
        )

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.default_group.rank

    @property
    def world_size(self) -> int:
        """Number of threads."""
        return self.default_group.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        """As `World.new_group`."""
        return self.default_group.new_group(ranks)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every thread has called it."""
        self.default_group.barrier(timeout_s)

    def close(self) -> None:
        """End it. Harmless when repeated."""
        self.default_group.close()

    def __enter__(self) -> MockWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _make(root: MockBackend, context: GroupContext) -> Backend:
        if context.name == root.context.name:
            return root
        assert isinstance(context.store, AbortableStore)
        return MockBackend(replace(context, store=context.store.inner))


def create_worlds(world_size: int, timeout_s: float = TIMEOUT_S) -> list[MockWorld]:
    """Worlds for as many threads.

    Raises:
        InvalidRequest: there must be at least one.
    """
    return [MockWorld(backend, timeout_s) for backend in MockBackend.create_world(world_size)]
