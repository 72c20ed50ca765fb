"""The sources of a model's values: first values, and replacements, epoch by epoch; and the mapping of values.

The coordinator's orders to restore a model, from a checkpoint or a worker's upload, are performed here, and uploads are
stored. The decisions are `shard.core.parameters`'s. One event loop; files are read in the files' thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from axon_ps.errors import AxonError, SliceMoved
from axon_ps.observe.work import LongWork
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.same_host import mapped_units
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.model_capacity import free
from axon_ps.shard.server.reports import ServerShell
from axon_ps.shard.server.waiters import EventOrder, Waiters
from axon_ps.types import Array
from axon_ps.wire.events import FIRST_VALUES, UPLOADED, RestoreOrder

_logger = logging.getLogger(__name__)


class ModelValues:
    """The epochs of one model's values.

    Args:
        number: number of the model.
        engine: the model's engine, which has the values.
        server: the server that it belongs to.
        waiters: woken when values are replaced.
        order: the queue of events about the model.
        replaced: called when there are new values.

    Attributes:
        epoch: the newest epoch known.
        served: epoch of the present values.
    """

    def __init__(
        self,
        number: int,
        engine: ShardEngine,
        server: ServerShell,
        waiters: Waiters,
        order: EventOrder[Any],
        replaced: Callable[[], None],
    ) -> None:
        self.epoch = 0
        self.served = 0
        self._ordered = 0  # epoch of the newest order; below, of the newest withdrawal for a worker's values
        self._withdrawn = 0
        self._number = number
        self._engine = engine
        self._server = server
        self._waiters = waiters
        self._order = order
        self._one_at_a_time = asyncio.Lock()
        self._on_replaced = replaced

    def begin(self, order: RestoreOrder) -> None:
        """Begin to carry out the coordinator's order."""
        uploaded = order.uri in (UPLOADED, FIRST_VALUES)
        self._engine.parameters.begin_restore(uploaded=uploaded)
        self._ordered = order.epoch
        self._server.start(self._replace(order, uploaded=uploaded))

    async def _replace(self, order: RestoreOrder, *, uploaded: bool) -> None:
        """Carry out one order at a time. Otherwise two orders could be exchanged while the model is not idle."""
        async with self._one_at_a_time:
            await self._order.idle.wait()
            self._engine.parameters.begin_restore(uploaded=uploaded)  # the previous order has ended its restore
            if uploaded:
                self._withdraw(order)
            else:
                await self._load(order)

    async def _load(self, order: RestoreOrder) -> None:
        """Replace the values by those of a checkpoint. They are withdrawn once all of it has been read and checked."""
        engine, reports = self._engine, self._server.reports
        assert reports is not None
        try:
            with self._server.working("restore") as work:
                prepare = partial(
                    snapshot.prepare, engine, order.uri, order.version, order.section, work, sha256=order.sha256
                )
                with contextlib.closing(await self._server.in_files_thread(prepare)) as restore:
                    restore.check_slices(engine)
                    engine.parameters.withdraw()
                    await self._server.in_files_thread(lambda: snapshot.load(engine, restore, work))
        except AxonError as error:
            _logger.error("restoring version %d from %s failed: %s", order.version, order.uri, error)
            engine.parameters.cancel_restore()
            self.served = order.epoch  # the remaining values, if any, are all that this epoch has
            reports.restore_report(order.epoch, error, model=self._number)
        else:
            engine.restored(order.version, restore.optimizer)
            self.epoch, self.served = max(self.epoch, order.epoch), order.epoch
            reports.initialized(version=order.version, epoch=order.epoch, model=self._number)
            self._on_replaced()
        self._waiters.wake_all()

    def _withdraw(self, order: RestoreOrder) -> None:
        """Withdraw the values before a worker uploads others."""
        self._engine.withdraw(order.version)
        self._withdrawn = order.epoch
        self._waiters.wake_all()
        if self._engine.parameters.initialized:  # no slice is owned here
            self._replaced()

    def _replaced(self) -> None:
        self._engine.parameters.restored()
        self.served = self._withdrawn
        self._report_initialized()
        self._waiters.wake_all()

    def _report_initialized(self) -> None:
        reports = self._server.reports
        assert reports is not None
        reports.initialized(version=self._engine.version, epoch=self.epoch, model=self._number)
        self._on_replaced()

    async def mapped(self, owned: OwnedSlice) -> SharedCopy | None:
        """Return a slice's wire copy in memory that workers can map; None if it must be sent.

        Only while the slice is `available` and no step is applied to it.

        Raises:
            SliceMoved: its values are corrupt, or it is not here any more.
        """
        if owned.wire.mapped is None and mapped_units.may_map(owned):
            async with self._order.begin_work():
                if self._engine.slices.get(owned.number) is not owned:
                    raise SliceMoved(f"slice {owned.number} is not on this shard server any more")
                if owned.wire.mapped is None:
                    make = partial(mapped_units.filled_copy, owned, owned.precision.param)
                    memory = await self._server.off_loop(make)
                    owned.refuse_corrupt()  # another check may have found corruption meanwhile
                    if memory is not None:
                        await self._server.off_loop(partial(free, owned.map(memory)))
        mapped = owned.wire.mapped
        assert mapped is None or isinstance(mapped, SharedCopy), "only this makes them"
        return mapped

    def works(self) -> Iterator[LongWork]:
        """Yield the upload of first values, while some are lacking."""
        slices = [s for s in self._engine.slices.values() if not s.copying]
        if self._engine.parameters.lacking:
            lacking = sum(min(s.chunks.numel, s.lacking * s.chunks.chunk_numel) for s in slices)
            total = sum(s.chunks.numel for s in slices)
            yield LongWork("upload", 4 * total, 4 * (total - lacking))

    def waits_for(self, epoch: int) -> bool:
        """Return True if first values of an epoch arrived before the values that they replace were withdrawn."""
        return self._withdrawn < epoch and self._ordered <= epoch

    async def upload(self, epoch: int, unit: int, offset: int, values: Array) -> bool:
        """Store first values of a chunk, unless a restore was ordered since; True if this server has all values."""
        parameters, version = self._engine.parameters, self._engine.version
        if epoch < self._ordered:
            return parameters.initialized
        if (stored := parameters.store(unit, offset, values, version)) is not None:
            # the uploader may leave meanwhile, and the slice is not uploaded again
            await asyncio.shield(self._server.start(self._publish(stored, version)))
        return parameters.initialized

    async def _publish(self, stored: OwnedSlice, version: int) -> None:
        """Make the frames of a slice that has all of its first values."""
        parameters = self._engine.parameters
        async with self._order.begin_work():
            replacing = parameters.replacing
            parameters.published(await self._server.off_loop(partial(stored.publish, version)))
            if parameters.initialized and replacing:
                self._replaced()
            elif parameters.initialized:
                self._report_initialized()
        self._waiters.wake_unit(stored.chunks.unit)
