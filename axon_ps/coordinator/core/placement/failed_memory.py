"""Failed memory of shard servers: another copy replaces the slice, or its values must be restored. Pure.

A server finds failed memory by digests (`shard.core.digests`). The copies of a slice are also compared in every step,
and the majority counts (`steps.decision`).
"""

from __future__ import annotations

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.decision import Difference
from axon_ps.wire.events import Corrupted


class FailedMemory:
    """The slices whose memory failed.

    Args:
        assembly: generations and steps.
        models: the models of the job.
        members: makes the generations in which steps are made again.
        out: gets the records to write and the events for the history.
    """

    def __init__(self, assembly: Assembly, models: Models, members: Members, out: Outbox) -> None:
        self._assembly = assembly
        self._models = models
        self._members = members
        self._out = out

    def corrupted(self, entry: RosterEntry, report: Corrupted, now: float) -> None:
        """Handle failed memory of a slice: another holder goes on with it, and the server gets it again.

        If the server was the primary, workers may be using values that it sent, and may have pushed gradients to it. So
        the step under way is over. If no other server has the slice, the parameters must be restored.
        """
        model = self._models.get(report.model)
        if model is None or not model.holders.is_holding(entry.member, report):
            return
        holders = model.holders
        what = self._models.message_prefix(model) + holders.described(report, entry.name)
        self._assembly.counters["slices_corrupted"] += report.lost
        if not report.lost:
            if model.open and report.generation == self._assembly.generation:
                self._members.change(f"{what}: the step is made again", now=now, kind="corrupt")
            return
        was_primary = holders.placement.holders[report.slice].primary == entry.member.rank
        if not holders.corrupted(entry.member.rank, report.slice):
            self._fail(model, f"{what}, and no other shard server holds that slice", now)
        else:
            self._members.placements.changed(model)
            if was_primary:
                self._members.change(what, now=now, kind="corrupt")
            else:
                self._out.happened("corrupt", what)

    def settle(self, now: float) -> None:
        """Handle the copies that were found to differ when a step was to be decided."""
        stepping = self._assembly.stepping
        differing, stepping.differing = stepping.differing, []
        for model, difference in differing:
            self._settle_difference(model, difference, now)

    def _settle_difference(self, model: Model, difference: Difference, now: float) -> None:
        """Have outvoted copies of a slice sent again; without a majority the parameters must be restored."""
        if not difference.outvoted:
            self._fail(model, str(difference), now)
            return
        for rank in difference.outvoted:
            model.holders.corrupted(rank, difference.slice)
        self._members.placements.changed(model)
        self._members.change(self._models.message_prefix(model) + str(difference), now=now, kind="corrupt")

    def _fail(self, model: Model, failure: str, now: float) -> None:
        """Mark a model's values as untrusted: no step is made before they are restored."""
        model.holders.parameters.failure = failure
        self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
        self._members.change(self._models.message_prefix(model) + failure, now=now, kind="corrupt")
