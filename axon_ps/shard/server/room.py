"""The memory that a shard server has for slices: what it tells the coordinator, and asked before it allocates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from axon_ps.coordinator.core.events import ServerMemory
from axon_ps.coordinator.core.placement.room import slice_sizes
from axon_ps.errors import Busy
from axon_ps.host.memory import available_bytes, pool
from axon_ps.observe.work import resident_bytes
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.memory import format_bytes
from axon_ps.sharding.placement import Placement
from axon_ps.types import OptimizerSpec

if TYPE_CHECKING:
    from axon_ps.shard.core.slices import OwnedSlice
    from axon_ps.shard.server.model_shell import ModelShell
    from axon_ps.shard.server.reports import Reports, ServerShell

_logger = logging.getLogger(__name__)


class Room:
    """What this process may allocate.

    Args:
        limit_bytes: what it may have in all; 0 = what the machine and its control groups let it have.
        available: returns what they do (tests give their own).
    """

    def __init__(self, limit_bytes: int = 0, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes
        self._available = available

    def free_bytes(self) -> int:
        """Bytes that could be allocated now; 0 = not known."""
        if self._limit_bytes:
            return max(1, self._limit_bytes - resident_bytes())
        return self._available()

    def report(self) -> ServerMemory | None:
        """What the coordinator is told; None where the system does not say."""
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
            Busy: there is not.
        """
        sizes = slice_sizes(spec, optimizer, placement.num_cuts, replicas)
        needed = sum(sizes[number] for number in placement.slices_of(rank) if number not in engine.slices)
        free = self.free_bytes()
        if free and needed > free:
            raise Busy(f"{format_bytes(needed)} are needed for it, and {format_bytes(free)} can be had")


class NoRoom(Busy):
    """There is no memory for what was to be made; it is reported, and the model goes on without, or not at all."""


class ModelRoom:
    """The memory of a model here: the places where some is made, each of which may find none.

    Args:
        server: the server's shell.

    Attributes:
        no_room: why there is none for the model, as text; empty when there is.
    """

    def __init__(self, server: ServerShell) -> None:
        self.no_room = ""
        self._server = server

    async def configure(
        self, model: ModelShell, spec: JobSpec, optimizer: OptimizerSpec | None, placement: Placement
    ) -> None:
        """Make our slices.

        Raises:
            NoRoom: there is no memory for them; nothing is here then.
        """
        engine, rank = model.engine, self._reports.rank
        try:
            self._server.room.check(engine, rank, placement, spec, optimizer, model.engine.gradients.num_replicas)
            made = await self._server.off_loop(lambda: engine.make(spec, placement, rank))
        except (Busy, MemoryError) as error:
            raise self._without(model, str(error) or "an allocation failed", placement.number) from error
        engine.configure(spec, rank, placement.num_cuts, placement, made)
        self.no_room = ""

    async def set_optimizer(self, model: ModelShell, optimizer: OptimizerSpec) -> None:
        """Make the optimizer's state.

        Raises:
            NoRoom: there is no memory for it; the model makes no step then.
        """
        engine = model.engine
        try:
            updater = await self._server.off_loop(lambda: engine.set_optimizer(optimizer))
            await self._server.off_loop(lambda: updater.warm_up(engine.precision.param))
        except MemoryError as error:
            placement = model.engine.placement
            assert placement is not None
            raise self._without(model, "there is no memory for the optimizer's state", placement.number) from error

    async def place(self, model: ModelShell, placement: Placement) -> list[OwnedSlice]:
        """Make what a placement gives us in addition; returns the slices that it takes from us.

        Raises:
            NoRoom: there is no memory for it; what is here stays.
            InvalidRequest: it is not of the slices that there can be.
        """
        engine = model.engine
        engine.slices.check(placement)
        assert engine.spec is not None
        optimizer = None if engine.updater is None else engine.updater.spec
        replicas, rank = engine.gradients.num_replicas, self._reports.rank
        spec = engine.spec
        try:
            self._server.room.check(engine, rank, placement, spec, optimizer, replicas)
            made = await self._server.off_loop(lambda: engine.make(spec, placement, rank))
        except (Busy, MemoryError) as error:
            why = Busy(str(error) or "an allocation failed")
            _logger.warning("model %r: there is no memory for further slices: %s", model.name, why)
            self._reports.no_room(model.number, placement.number, why)
            raise NoRoom(str(why)) from error
        return engine.place(placement, rank, made)

    def _without(self, model: ModelShell, why: str, placement: int) -> NoRoom:
        """The model is not here: whoever calls for it is told, and the other models go on."""
        _logger.error("model %r cannot be held here: %s", model.name, why)
        self.no_room = f"model {model.name!r} is not held by shard server {self._reports.rank}: {why}"
        self._reports.no_room(model.number, placement, Busy(why))
        return NoRoom(why)

    @property
    def _reports(self) -> Reports:
        assert self._server.reports is not None
        return self._server.reports
