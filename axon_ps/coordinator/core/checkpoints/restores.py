"""Replacing the parameters of models: orders to the shard servers, their reports, the reply to the caller. Pure.

A restore makes a new generation, since every copy of a parameter is stale from then on. Several models are restored by
one event, so all change together. If one of them cannot be loaded, the job waits for another restore.

Note: [Values that do not exist yet]
    Until every shard server of a placement has its values, no value has a second copy. So if a server is lost then, and
    enough others are live, the values are ordered once more for the live ones: from the checkpoint, or from a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axon_ps.coordinator import attachments
from axon_ps.coordinator.attachments import Attachment
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.kv import KeyValues
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.errors import AxonError, Busy, CheckpointError, InvalidRequest, Misuse
from axon_ps.types import OptimizerSpec, Role
from axon_ps.wire.events import FIRST_NAME, FIRST_VALUES, UPLOADED, CheckpointReply, RestoreOrder


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The checkpoint that a model begins with or is restored from, by its manifest.

    Attributes:
        uri: the checkpoint.
        version: of the model in it.
        model: name of the model in the job.
        section: name of the model in the checkpoint; empty = the only model in it.
        sha256: the manifest's hash of itself; empty = it has none.
        committed: the values that were committed with its steps up to that version; None = they stay.
        attached: the checkpoint's attachments by key, among them `BUFFERS` with the model's name in the job; None = as
            in the earlier order that is repeated.
        optimizer: the optimizer that the saved moments belong to, with its groups at that version; None = none.
    """

    uri: str
    version: int
    model: str = FIRST_NAME
    section: str = ""
    sha256: str = field(default="", compare=False)
    committed: Mapping[str, str] | None = None
    attached: Mapping[str, Attachment] | None = field(default=None, compare=False)
    optimizer: OptimizerSpec | None = None


class Restores:
    """The restore in progress, and the holders of all parameters.

    Args:
        assembly: generations and steps.
        models: the models of the job.
        members: joins, leaves and losses.
        snapshots: the checkpoint being written.
        out: gets the records to write and the events to send.
        kv: gets the attachments of checkpoints.
        replication: the number of shard servers that hold each slice.
    """

    def __init__(
        self,
        assembly: Assembly,
        models: Models,
        members: Members,
        snapshots: Snapshots,
        out: Outbox,
        kv: KeyValues,
        replication: int,
    ) -> None:
        self._kv = kv
        self._replication = replication
        self._assembly = assembly
        self._models = models
        self._members = members
        self._snapshots = snapshots
        self._out = out
        self._call = -1
        self._together: frozenset[int] = frozenset()  # the models of the newest order
        members.on_change.append(self._order_again)
        self._stored = {m.number: records.parameters_record(m.number, m.holders.parameters) for m in models}

    def restore(self, call: int, resumes: Sequence[Resume], now: float) -> list[Action]:
        """Restore models from a checkpoint. `call` gets a `CheckpointReply` when all servers have loaded it.

        The caller of this is checked beforehand, by `access.callers`, since files are read in between.

        Raises:
            Misuse: the job has no layout yet.
            InvalidRequest: the job does not have one of the models.
            Busy: there is no memory for it, or no capacity for the attachments. Nothing has changed.
        """
        if not self._models.registered:
            raise Misuse("there is nothing to restore into: no worker has registered a layout yet")
        self.order(resumes, now, call)
        return self._out.take()

    def replace(self, call: int, now: float, name: str) -> list[Action]:
        """Have a worker upload other values of a model. The reply and the errors are those of `restore`."""
        model = self._models.named(name)
        version = 0 if model is None else model.version
        return self.restore(call, [Resume(uri=UPLOADED, version=version, model=name)], now)

    def attached(self) -> dict[str, Attachment]:
        """Return by key the attachments of workers to the checkpoints of the job."""
        return attachments.stored(self._kv)

    def begin_again(self, now: float) -> list[Action]:
        """Begin a job again that `lost_everything`: the next worker uploads first values, for version 0."""
        self.order([Resume(uri=FIRST_VALUES, version=0, model=model.name) for model in self._models.registered], now)
        return self._out.take()

    def order(self, resumes: Sequence[Resume], now: float, call: int = -1) -> None:
        """Have the servers load models from a checkpoint, or receive the values that a worker uploads.

        `call` gets a `CheckpointReply` when they hold them. Errors are those of `restore`.
        """
        if not resumes:
            raise InvalidRequest("the checkpoint has no model of this job; name another checkpoint")
        a = self._assembly
        found = [(self._named(resume), resume) for resume in resumes]
        placements = {
            model.number: (model, model.holders.new_placement(spec, a.servers(), self._replication))
            for model, _ in found
            if (spec := model.registration.spec) is not None
        }
        a.capacity().check(placements, f"the restore of {resumes[0].uri}")
        self._attach(found)
        # from here on nothing is refused: the present values are given up
        reason = _reason(resumes[0])
        self._answer(CheckpointError(f"cancelled: {reason} instead"))
        self._snapshots.abandon(CheckpointError(f"the checkpoint was not written: {reason}"))
        a.stepping.abort_all(reason)
        for model, resume in found:
            _, placement = placements[model.number]
            order = model.holders.begin_restore(resume.uri, resume.version, placement, resume.section, resume.sha256)
            model.version = resume.version
            if resume.committed is not None:
                model.committed = dict(resume.committed)
                self._out.persist([records.committed_record(model.number, model.committed)])
            if resume.uri != UPLOADED:
                self._out.persist(model.restore(resume.optimizer))
            a.announce(model)
            self._out.push([s.session for s in a.roster.of_role(Role.SHARD)], order)
        self.persist()
        self._together = frozenset(model.number for model, _ in found)
        self._members.change(reason, now=now)
        self._call = call

    def _attach(self, found: Sequence[tuple[Model, Resume]]) -> None:
        """Store the attachments of checkpoints, with the epochs that the models are about to begin."""
        values: dict[str, bytes] = {}
        for model, resume in found:
            if resume.uri not in (FIRST_VALUES, UPLOADED):
                epoch = model.holders.parameters.epoch + 1
                values |= attachments.restored(self._kv, model.name, epoch, resume.uri, resume.attached)
        self._kv.put_own(values)

    def _order_again(self, now: float) -> None:
        """Repeat orders after a change of members. See Note: [Values that do not exist yet]."""
        here = {shard.rank for shard in self._assembly.shards()}
        models = [m for m in self._models.registered if m.holders.awaits_values]
        gone = any(not m.holders.placement.servers <= here for m in models)
        if not gone or len(here) < self._assembly.needed_shards:
            return
        call, self._call = self._call, -1
        try:
            self.order([_resume(model) for model in models], now, call)
        except Busy as error:
            self._call = call
            self._out.happened("full", str(error))

    def _named(self, resume: Resume) -> Model:
        model = self._models.named(resume.model)
        if model is None or not model.registered:
            raise InvalidRequest(f"the job has no model {resume.model!r}; it was released, or is not wrapped yet")
        return model

    def initialized(self, entry: RosterEntry, number: int, version: int, epoch: int) -> None:
        """Note that a shard server holds all its parameters of a model, unless the model was released meanwhile."""
        a, model = self._assembly, self._models.get(number)
        if model is None:
            return
        holders, p = model.holders, model.holders.parameters
        if holders.initialized_by(entry.member, version, epoch, model.version):
            if holders.all_loaded(a.shards()):
                order, p.restore, p.initialized = p.restore, None, True
                model.first_values.waiting.clear()
                a.announce(model)
                if order is not None and not self._loading():
                    self._answer(CheckpointReply(uri=order.uri, version=order.version))
            self.persist()

    def _loading(self) -> list[Model]:
        """Return the models of the newest order that are not loaded yet."""
        return [m for m in self._models if m.number in self._together and m.holders.parameters.restore is not None]

    def failed(self, entry: RosterEntry, number: int, epoch: int, error: AxonError, now: float) -> None:
        """Fail a restore that a shard server could not perform, with all models restored together."""
        model = self._models.get(number)
        order = None if model is None else model.holders.parameters.restore
        if model is not None and order is not None and order.epoch == epoch:
            what = f"shard server {entry.member.rank} could not restore {order.uri}: {error}"
            for other in self._loading() or [model]:
                other.holders.parameters.restore, other.holders.parameters.failure = None, what
            self.persist()
            self._answer(type(error)(what))
            self._members.change(what, now=now)

    def out_of_memory(self, entry: RosterEntry, number: int, placement: int, error: AxonError, now: float) -> None:
        """Handle a shard server without memory for a placement: for its part of the model, or for copies of slices."""
        model = self._models.get(number)
        if model is None or model.holders.placement_number != placement:
            return
        holders, p, rank = model.holders, model.holders.parameters, entry.member.rank
        why = f"shard server {rank} cannot hold it: {error}"
        self._out.happened("full", f"{self._models.message_prefix(model)}{why}")
        if p.initialized and holders.is_loaded(entry.member):
            entry.full = True
            self._members.placements.cancel_copies(entry.member)
        elif p.restore is not None and p.restore.uri != FIRST_VALUES:
            self.failed(entry, number, p.epoch, error, now)
        else:
            holders.out_of_memory[rank] = why
            self._assembly.announce(model, full=False)

    def try_again(self) -> None:
        """Try again to place models that did not fit, since memory has become free."""
        for entry in self._assembly.roster.of_role(Role.SHARD):
            entry.full = False
        for model in self._models.registered:
            if model.holders.out_of_memory:
                model.holders.out_of_memory.clear()
                self._assembly.announce(model)

    def cancel(self, call: int) -> None:
        """Forget a call that its caller does not wait for any more."""
        if self._call == call:
            self._call = -1

    def pending(self) -> Sequence[str]:
        """Return the reasons why restores are not complete, as text."""
        orders = [(self._models.message_prefix(m), m.holders.parameters.restore) for m in self._models]
        out_of_memory = [m.holders.out_of_memory_reason for m in self._models if m.holders.out_of_memory]
        return [*(prefix + _pending(order) for prefix, order in orders if order is not None), *out_of_memory]

    def persist(self) -> None:
        """Persist the holders of parameters where they have changed."""
        for model in self._models:
            record = records.parameters_record(model.number, model.holders.parameters)
            if record != self._stored.get(model.number):
                self._stored[model.number] = record
                self._out.persist([record])

    def released(self, model: Model) -> None:
        """Forget a released model."""
        self._stored.pop(model.number, None)
        if model.number in self._together:
            self._together -= {model.number}
            if not self._loading():
                self._answer(CheckpointError(f"model {model.name!r} was released while it was restored"))

    def _answer(self, result: object) -> None:
        call, self._call = self._call, -1
        if call >= 0:
            self._out.reply(call, result)


def _reason(resume: Resume) -> str:
    """Return the reason why steps under way are aborted, as text for users."""
    if resume.uri == FIRST_VALUES:
        return "the job begins again"
    if resume.uri == UPLOADED:
        model = f" of model {resume.model!r}" if resume.model else ""
        return (
            f"the values{model} were replaced by a worker, by load_state_dict() or the like: a step whose backward was "
            "before that is dropped"
        )
    return f"checkpoint {resume.uri} is restored"


def _resume(model: Model) -> Resume:
    """Return the order to repeat for a model without values."""
    order = model.holders.parameters.restore
    if order is None:
        return Resume(uri=FIRST_VALUES, version=model.version, model=model.name)
    return Resume(uri=order.uri, version=order.version, model=model.name, section=order.section, sha256=order.sha256)


def _pending(order: RestoreOrder) -> str:
    if order.uri == FIRST_VALUES:
        return "the job begins again, and waits for first values: those of the next worker that is started"
    return f"the restore of {order.uri} waits for the shard servers"
