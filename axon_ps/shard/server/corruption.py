"""The handling of corrupt memory on a server: detecting it, not serving it, and reporting it.

Note: [What is looked at]
    Each update checks everything that it reads. Data read for another purpose is checked first: values that are encoded
    later, a slice that another server copies, a checkpoint. A sum is forwarded with its digest, and is checked if the
    backup refuses it. Slices that steps do not change are checked one after another, `LOOKED_AT_NUMEL` elements after
    each applied step. Memory that workers of the host map is not checked before its use. They may have read a changed
    bit before the next update finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from axon_ps.errors import SliceMoved
from axon_ps.shard.core.differences import SentValues
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.reports import ServerShell
from axon_ps.wire.events import MAX_BLOCKS, Corrupted

LOOKED_AT_NUMEL: Final = 1 << 20
"""Elements checked at a time on the event loop, and elements of unchanged slices checked after each applied step."""

_logger = logging.getLogger(__name__)


class Corruptions:
    """The corruptions of one model's slices.

    Args:
        model: its number.
        engine: its slices.
        server: the server that it belongs to.
        epoch: returns the number of restores of the model.
        wake: called after corruptions were reported.
    """

    def __init__(
        self, model: int, engine: ShardEngine, server: ServerShell, epoch: Callable[[], int], wake: Callable[[], None]
    ) -> None:
        self._model = model
        self._engine = engine
        self._server = server
        self._epoch = epoch
        self._wake = wake
        self._next = 0, 0  # slice and chunk to check with the next commit

    def report(self, owned: OwnedSlice) -> bool:
        """Report the corruptions of a slice since the last call; returns True if there were any but of `sent`.

        Corruptions found while a step is applied to the slice are reported afterwards, since the update checks all of
        it.
        """
        if owned.applying:
            return False
        if owned.wire.sent is not None:
            self._report_sent(owned.wire.sent)
        if not owned.corruptions:
            return False
        found, engine = owned.take_corruptions(), self._engine
        engine.counters["corruptions"] += len(found)
        for c in found[:MAX_BLOCKS]:
            what = c.array, engine.unit_name(c.unit), c.begin, c.end
            _logger.error("memory is corrupt: %s of unit %s, elements %d to %d", *what)
        if self._server.reports is not None and engine.placement is not None:
            self._server.reports.corrupted(
                Corrupted(
                    model=self._model,
                    epoch=self._epoch(),
                    slice=owned.number,
                    placement=engine.placement.number,
                    generation=engine.generation,
                    lost=owned.corrupt,
                    version=engine.version,
                    blocks=tuple((c.array, c.begin, c.end) for c in found[:MAX_BLOCKS]),
                )
            )
        self._wake()
        return True

    def _report_sent(self, sent: SentValues) -> None:
        """Log the corruptions of `sent`, which were repaired. Nothing else has to be done."""
        found, sent.corruptions = sent.corruptions, []
        self._engine.counters["corruptions"] += len(found)
        for c in found[:MAX_BLOCKS]:
            what = self._engine.unit_name(c.unit), c.begin, c.end
            _logger.error("memory is corrupt: what was sent of unit %s, elements %d to %d; it is sent in full", *what)

    async def verify(self, owned: OwnedSlice) -> None:
        """Check all of a slice, a part at a time, as long as no step changes it.

        Raises:
            SliceMoved: it is corrupt.
        """
        version, chunks = owned.reached, len(owned.chunks.bounds)
        at_once = max(1, LOOKED_AT_NUMEL // owned.chunks.chunk_numel)
        for first in range(0, chunks, at_once):
            if owned.applying or owned.lacking or owned.reached != version:
                return
            owned.check(first, min(first + at_once, chunks))
            if self.report(owned):
                raise SliceMoved(f"slice {owned.number} is corrupt on this shard server")
            await asyncio.sleep(0)

    def look_at_unchanged(self) -> None:
        """Check some of the slices that an applied step did not change."""
        version, left = self._engine.version, LOOKED_AT_NUMEL
        unchanged = [s for s in self._engine.slices.values() if s.changed != version and not (s.applying or s.lacking)]
        number, chunk = self._next
        in_order = sorted(unchanged, key=lambda s: (s.number < number, s.number))
        for owned in in_order:
            first = chunk if owned.number == number else 0
            last = min(len(owned.chunks.bounds), first + max(1, left // owned.chunks.chunk_numel))
            if first < last:
                owned.check(first, last)
                self.report(owned)
                left -= (last - first) * owned.chunks.chunk_numel
            self._next = (owned.number, last) if last < len(owned.chunks.bounds) else (owned.number + 1, 0)
            if left <= 0:
                return
