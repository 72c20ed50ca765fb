"""Allocation and freeing of the memory of one model on a shard server, off its event loop."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from axon_ps.errors import Busy
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.reports import Reports, ServerShell
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.types import Array, OptimizerSpec

RELEASED_NUMEL: Final = 8 << 20
"""Elements of an array that are freed at a time."""

_logger = logging.getLogger(__name__)


class OutOfMemory(Busy):
    """There is not enough memory for slices of a model. The server goes on without them and has reported it."""


class ModelCapacity:
    """The memory of a model on this server, which may not have enough.

    Args:
        server: the server's shell.
        engine: the model's.
        number: the model's.

    Attributes:
        missing: the reason, in words, why the model has no memory here; empty if it has.
    """

    def __init__(self, server: ServerShell, engine: ShardEngine, number: int) -> None:
        self.missing = ""
        self._server = server
        self._engine = engine
        self._number = number
        self._name = ""

    async def configure(self, name: str, spec: JobSpec, optimizer: OptimizerSpec | None, placement: Placement) -> None:
        """Make this server's slices of the model, and set the model's name.

        Raises:
            OutOfMemory: there is not enough memory. No slice was made.
        """
        engine, rank, self._name = self._engine, self._reports.rank, name
        try:
            self._server.capacity.check(engine, rank, placement, spec, optimizer, engine.gradients.num_replicas)
            made = await self._server.off_loop(lambda: engine.make(spec, placement, rank))
        except (Busy, MemoryError) as error:
            raise self._without(str(error) or "an allocation failed", placement.number) from error
        engine.configure(spec, rank, placement.num_cuts, placement, made)
        self.missing = ""

    async def set_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Make the optimizer's state.

        Raises:
            OutOfMemory: there is not enough memory. The model cannot step.
            InvalidRequest: the optimizer or a hyperparameter is unknown, or groups do not cover the layout.
        """
        engine = self._engine
        try:
            updater = await self._server.off_loop(lambda: engine.optimizer.set(optimizer))
            await self._server.off_loop(lambda: updater.warm_up(engine.precision.param))
        except MemoryError as error:
            placement = engine.placement
            assert placement is not None
            raise self._without("there is no memory for the optimizer's state", placement.number) from error

    async def set_placement(self, placement: Placement) -> list[OwnedSlice]:
        """Make the slices that a placement adds to this server; returns the slices that it removes.

        Raises:
            OutOfMemory: there is not enough memory. The present slices stay.
            InvalidRequest: it is not a placement of the model's slices.
        """
        engine = self._engine
        engine.slices.check(placement)
        assert engine.spec is not None
        updater = engine.optimizer.updater
        optimizer = None if updater is None else updater.spec
        replicas, rank = engine.gradients.num_replicas, self._reports.rank
        spec = engine.spec
        try:
            self._server.capacity.check(engine, rank, placement, spec, optimizer, replicas)
            made = await self._server.off_loop(lambda: engine.make(spec, placement, rank))
        except (Busy, MemoryError) as error:
            why = Busy(str(error) or "an allocation failed")
            _logger.warning("model %r: there is no memory for further slices: %s", self._name, why)
            self._reports.out_of_memory(self._number, placement.number, why)
            raise OutOfMemory(str(why)) from error
        return engine.set_placement(placement, rank, made)

    def _without(self, why: str, placement: int) -> OutOfMemory:
        """Report that the model is not held here, and return the error for its callers. Other models go on."""
        _logger.error("model %r cannot be held here: %s", self._name, why)
        self.missing = f"model {self._name!r} is not held by shard server {self._reports.rank}: {why}"
        self._reports.out_of_memory(self._number, placement, Busy(why))
        return OutOfMemory(why)

    @property
    def _reports(self) -> Reports:
        assert self._server.reports is not None
        return self._server.reports


def free_slices(slices: list[OwnedSlice]) -> None:
    """Close slices and free their memory, one after the other. This list must have the last references."""
    while slices:
        free(slices.pop().close())


def free(memory: list[Array | bytes]) -> None:
    """Free memory a piece at a time. This list must have the last references.

    Python's global lock is held while the kernel frees a piece, which takes 0.3 s for a GiB, so that the event loop
    stands still whichever thread frees it. An array is freed from its end.
    """
    while memory:
        item = memory.pop()
        if not isinstance(item, bytes):
            with contextlib.suppress(ValueError):  # it is still read elsewhere, or frees itself (`host.shared_memory`)
                while item.size > RELEASED_NUMEL:
                    item.resize(item.size - RELEASED_NUMEL)
