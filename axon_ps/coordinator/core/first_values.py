"""The first values of a model come from one worker, the *uploader*, or from a checkpoint. Pure.

Note: [Whose values are first]
    Every worker has a module. Its layout and values may differ from the others': it was built otherwise, has loaded
    weights, or had another seed. Those of the lowest rank count, as in torch's DDP and in FSDP's `sync_module_states`.
    The other workers' registrations are held until that worker has registered. A worker with a refused layout counts no
    more, and the others do not wait for it. If the uploader dies, the generation changes, the others register again,
    and the lowest rank among them uploads. While it lives, no other worker replaces it, since the servers may have some
    of its values. When a job begins again, a worker that has trained has no first values any more. Then the lowest rank
    among the workers that wait for first values counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from axon_ps.coordinator.core.placement.holders import SliceHolders
from axon_ps.coordinator.core.registration import Registration
from axon_ps.wire.events import FIRST_VALUES


class FirstValues:
    """The workers that may give a model its first values. See Note: [Whose values are first].

    Args:
        registration: of the model.
        holders: the servers that get the values.

    Attributes:
        waiting: incarnations of workers that registered the layout while it had no values, and wait for first ones.
    """

    def __init__(self, registration: Registration, holders: SliceHolders) -> None:
        self._registration = registration
        self._holders = holders
        self.waiting: set[str] = set()

    def comes_before(self, incarnation: str, there: Sequence[str]) -> str:
        """Return the worker that must register before another one; empty = none.

        Args:
            incarnation: the other worker.
            there: the incarnations of the workers that count, by rank. See Note: [Whose values are first].
        """
        if self._registration.spec is not None and (not self._needs_first_values or self._begins_again):
            return ""
        if self._holders.parameters.uploader in there:
            return ""
        first = there[0] if there else ""
        return "" if first == incarnation or first in self.waiting else first

    def claim_upload(self, incarnation: str, there: Sequence[str], row: Collection[str] = ()) -> bool:
        """Return True if the caller is to upload the first values, or its part of them.

        Args:
            incarnation: the caller.
            there: the workers that count, by rank. See Note: [Whose values are first].
            row: if workers of a replica have different units, those of the caller's; each uploads its own.
        """
        p = self._holders.parameters
        if not self._needs_first_values:
            return False
        self.waiting.intersection_update(there)
        if p.uploader not in there:
            p.uploader = next((w for w in there if w in self.waiting or not self._begins_again), "")
        return p.uploader == incarnation or p.uploader in row

    @property
    def _begins_again(self) -> bool:
        restore = self._holders.parameters.restore
        return restore is not None and restore.uri == FIRST_VALUES

    @property
    def _needs_first_values(self) -> bool:
        p = self._holders.parameters
        return not p.initialized and (p.epoch == 0 or self._begins_again)
