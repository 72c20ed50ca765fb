"""Gradients that stay on this worker: those inside `no_sync()`, and those of all but the last micro-batch of a step.

`FSDPModule.set_requires_gradient_sync` may choose units whose gradients stay, while those of others are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.steps import StepBatch
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients


class Accumulation:
    """The gradients of one model that are accumulated before they are sent.

    Args:
        flats: the flat units of the model.
        sent: records those that are staged.
        meter: counts the memory of staged gradients.
        stages: True if gradients that stay here are staged: in host memory (CPUOffload.FULL), or since they are sent
            in a wider dtype than they are computed in, in which they are to be summed.

    Attributes:
        syncing: True if gradients are pushed; False inside `no_sync()`.
        local: numbers of the units whose gradients stay here although others are pushed.
        batch: the batch of the next backward's gradients, if a loader deals the samples; see `begin`.
    """

    def __init__(self, flats: Sequence[FlatUnit], sent: SentGradients, meter: Meter, *, stages: bool) -> None:
        self._flats = flats
        self._sent = sent
        self._meter = meter
        self._stages = stages
        self.syncing = True
        self.local: frozenset[int] = frozenset()
        self.batch: StepBatch | None = None

    def begin(self, batch: StepBatch, *, adds: bool) -> None:
        """Set the batch of the next backward's gradients, which a loader gives to the program.

        Gradients of the step's earlier batches will be multiplied by its weight when they are pushed, so they are
        rescaled for it here.

        Args:
            batch: the batch.
            adds: True if there are gradients of earlier batches.

        Raises:
            Misuse: the batch has weight 0, and there are gradients of batches that have another weight.
        """
        before, self.batch = self.batch, batch
        if before is None or before.weight == batch.weight or not adds:
            return
        if not batch.weight:
            raise Misuse(
                "gradients of several batches are accumulated, and of the last one there is nothing for this worker: "
                "the data set ends with fewer samples than there are workers. Use drop_last=True, or step after each"
            )
        for flat in self._flats:
            staged_bytes = flat.grads.staged_bytes
            flat.grads.multiply(before.weight / batch.weight)
            self._meter.add(flat.grads.staged_bytes - staged_bytes)

    @property
    def goes_on(self) -> bool:
        """True if gradients stay here, since more micro-batches of the step are to come on this worker."""
        return self.batch is not None and not self.batch.is_last

    @property
    def sums_batches(self) -> bool:
        """True if this worker's gradient of the step is a sum over several batches, which must not be dropped."""
        return self.batch is not None and self.batch.count > 1

    def pushes(self, unit: int) -> bool:
        """Return True if complete gradients of a unit are pushed now."""
        return self._syncs(unit) and not self.goes_on

    @property
    def has_local(self) -> bool:
        """True if there are gradients of units whose gradients are to stay here."""
        return any(flat.grads.present for flat in self._flats if not self._syncs(flat.index))

    def _syncs(self, unit: int) -> bool:
        return self.syncing and unit not in self.local

    @property
    def stages(self) -> bool:
        """True if gradients are staged; always before the last micro-batch, so that only the sum is clipped."""
        return self._stages or self.goes_on

    def stage(self, flat: FlatUnit) -> None:
        """Stage the gradients of `no_sync()`, or of a micro-batch."""
        before = flat.grads.staged_bytes
        flat.grads.stage()
        self._sent.add(flat.index, len(flat.params))
        self._meter.add(flat.grads.staged_bytes - before)
