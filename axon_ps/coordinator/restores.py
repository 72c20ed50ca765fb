"""Replacing the job's parameters: the order to the shard servers, their reports, and the answer to who asked. Pure.

A restore makes a new generation, since every copy of a parameter is stale from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axon_ps.coordinator import records
from axon_ps.coordinator.actions import Outbox
from axon_ps.coordinator.assembly import Assembly
from axon_ps.coordinator.events import CheckpointInfo
from axon_ps.coordinator.members import Members
from axon_ps.coordinator.registration import RESTORE_HINT, Registration
from axon_ps.coordinator.roster import Seat
from axon_ps.coordinator.snapshots import Snapshots
from axon_ps.errors import AxonError, CheckpointError
from axon_ps.types import Role


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint that the job is to begin with, or go back to: what its manifest says."""

    uri: str
    version: int


class Restores:
    """The restore under way, and who holds what.

    Args:
        assembly: generations and steps.
        registration: what the job is made of.
        members: who comes and goes.
        snapshots: the checkpoint being written.
        out: gets what is to be written and said.
    """

    def __init__(
        self, assembly: Assembly, registration: Registration, members: Members, snapshots: Snapshots, out: Outbox
    ) -> None:
        self._assembly = assembly
        self._registration = registration
        self._members = members
        self._snapshots = snapshots
        self._out = out
        self._call = -1
        self._stored = records.parameters_record(registration.parameters)

    def order(self, resume: Resume, now: float, call: int = -1) -> None:
        """Have the servers load a checkpoint, or take what a worker uploads; `call` gets a `CheckpointInfo`."""
        a, r = self._assembly, self._registration
        reason = f"checkpoint {resume.uri} is restored"
        self._answer(CheckpointError(f"given up: {reason} instead"))
        self._snapshots.abandon(CheckpointError(f"the checkpoint was not written: {reason}"))
        a.abort(reason)
        order = r.begin_restore(resume.uri, resume.version)
        a.version = resume.version
        self.persist()
        a.announce_job()
        self._out.push([s.session for s in a.roster.of_role(Role.SHARD)], order)
        self._members.change(reason, now=now)
        self._call = call

    def initialized(self, seat: Seat, version: int, epoch: int) -> None:
        """A shard server holds all its parameters.

        Raises:
            InvalidRequest: the version is not the job's.
        """
        a, r = self._assembly, self._registration
        if r.initialized_by(seat.member, version, epoch, a.version):
            if r.all_hold(a.shards()):
                order, r.parameters.restore, r.parameters.initialized = r.parameters.restore, None, True
                a.announce_job()
                if order is not None:
                    self._answer(CheckpointInfo(uri=order.uri, version=order.version))
            self.persist()

    def failed(self, seat: Seat, epoch: int, error: AxonError, now: float) -> None:
        """A shard server could not restore."""
        order = self._registration.parameters.restore
        if order is not None and order.epoch == epoch:
            what = f"shard server {seat.member.rank} could not restore {order.uri}: {error}"
            self._registration.fail_restore(f"{what}; {RESTORE_HINT}")
            self.persist()
            self._answer(type(error)(what))
            self._members.change(what, now=now)

    def cancel(self, call: int) -> None:
        """Nobody waits for this call any more."""
        if self._call == call:
            self._call = -1

    def pending(self) -> Sequence[str]:
        """What is waited for, in words."""
        order = self._registration.parameters.restore
        return [f"the restore of {order.uri} waits for the shard servers"] if order is not None else []

    def persist(self) -> None:
        """Write who holds what, if that has changed."""
        record = records.parameters_record(self._registration.parameters)
        if record != self._stored:
            self._stored = record
            self._out.persist([record])

    def _answer(self, result: object) -> None:
        call, self._call = self._call, -1
        if call >= 0:
            self._out.reply(call, result)
