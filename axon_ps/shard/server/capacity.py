"""The memory that a shard server has for slices: the report to the coordinator, and the check before it allocates."""

from __future__ import annotations

from collections.abc import Callable

from axon_ps.errors import Busy
from axon_ps.host.memory import available_bytes, pool
from axon_ps.observe.work import resident_bytes
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.memory import format_bytes, slice_sizes
from axon_ps.sharding.placement import Placement
from axon_ps.types import OptimizerSpec
from axon_ps.wire.events import ServerMemory


class Capacity:
    """The memory that this process may allocate.

    Args:
        limit_bytes: limit of all its memory; 0 = the limit of the machine and its control groups.
        available: returns the bytes that are still free (tests pass their own).
    """

    def __init__(self, limit_bytes: int = 0, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes
        self._available = available

    def free_bytes(self) -> int:
        """Return the bytes that could be allocated now; 0 = not known."""
        if self._limit_bytes:
            return max(1, self._limit_bytes - resident_bytes())
        return self._available()

    def report(self) -> ServerMemory | None:
        """Return the report to the coordinator; None if the free memory is not known."""
        free = self.free_bytes()
        if not free:
            return None
        shared = "" if self._limit_bytes else pool()
        return ServerMemory(available_bytes=free, resident_bytes=resident_bytes(), pool=shared)

    def check(
        self,
        engine: ShardEngine,
        rank: int,
        placement: Placement,
        spec: JobSpec,
        optimizer: OptimizerSpec | None,
        replicas: int,
    ) -> None:
        """Check that there is memory for the slices that a placement gives to `rank` and an engine does not have yet.

        Raises:
            Busy: there is not enough.
        """
        sizes = slice_sizes(spec, optimizer, placement.num_cuts, replicas)
        needed = sum(sizes[number] for number in placement.slices_of(rank) if number not in engine.slices)
        free = self.free_bytes()
        if free and needed > free:
            raise Busy(f"{format_bytes(needed)} are needed for it, and {format_bytes(free)} can be had")
