"""Checkpoints being written: one order at a time, reports of all shard servers, one answer. Pure.

The answer names every file. The shell writes the manifest, which makes the directory a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import AxonError, Busy, MemberLost, Misuse
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.types import ModelProgress, OptimizerSpec, Role
from axon_ps.wire.events import SnapshotFile, SnapshotOrder, SnapshotReport


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model in a checkpoint.

    Attributes:
        number: its number in the job.
        name: its name.
        version: the version written.
        spec: its layout.
        optimizer: its optimizer, if it has one.
        placement: its placement. The primaries write it.
        committed: the values that were committed with its steps up to that version.
    """

    number: int
    name: str
    version: int
    spec: JobSpec
    optimizer: OptimizerSpec | None
    placement: Placement
    committed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint whose files are all written, except for the manifest; or the files of a failed one.

    Attributes:
        uri: its directory.
        files: of all shard servers, in rank order.
        ranks: per file, the shard server that wrote it.
        models: its models, by number.
        error: the reason why it is incomplete. Then `files` are to be removed.
    """

    uri: str
    files: tuple[SnapshotFile, ...]
    ranks: tuple[int, ...]
    models: tuple[SavedModel, ...]
    error: AxonError | None = None


@dataclass
class _Save:
    call: int
    order: SnapshotOrder
    models: tuple[SavedModel, ...]
    waits_for: set[int]
    files: dict[int, Sequence[SnapshotFile]] = field(default_factory=dict)
    error: AxonError | None = None


class Snapshots:
    """The order in progress.

    Args:
        last_id: number of the newest order before the coordinator's restart.
        assembly: the shard servers that write.
        models: the models of the job.
        out: gets the record and the order, and the answers.
    """

    def __init__(self, last_id: int, assembly: Assembly, models: Models, out: Outbox) -> None:
        self.last_id = last_id
        self._assembly = assembly
        self._models = models
        self._out = out
        self._save: _Save | None = None

    def check_free(self) -> None:
        """Refuse another order while one is in progress."""
        if self._save is not None:
            raise Busy(f"a checkpoint is being written to {self._save.order.uri} already; try again when it is done")

    def save(self, call: int, uri: str, *, background: bool = False) -> list[Action]:
        """Begin a checkpoint of the current version. `call` gets a `Snapshot`.

        In the `background` it takes longer, and steps are slowed less. The caller of this is checked beforehand, by
        `access.callers`, since files are read in between.

        Raises:
            Misuse: there is nothing to save.
            MemberLost: the job waits for shard servers.
            Busy: another is being written.
        """
        if not self._models.registered:
            raise Misuse("there is nothing to save: the shard servers hold no parameters yet")
        models = tuple(self._saved(m) for m in self._models.registered if not m.holders.out_of_memory)
        if self._assembly.pending_shards:
            raise MemberLost(f"nothing can be saved: the job waits for {self._assembly.membership.waiting_for}")
        self.check_free()
        self.last_id += 1
        version = next((m.version for m in models if m.number == 0), 0)
        others = tuple(ModelProgress(model=m.number, step=0, version=m.version) for m in models if m.number)
        order = SnapshotOrder(id=self.last_id, uri=uri, version=version, models=others, background=background)
        servers = self._assembly.roster.of_role(Role.SHARD)
        self._save = _Save(call, order, models, {s.member.rank for s in servers})
        self._out.persist([records.orders_record(self.last_id)])
        self._out.push([s.session for s in servers], order)
        return self._out.take()

    def _saved(self, model: Model) -> SavedModel:
        spec = model.registration.spec
        if spec is None or not model.state(self._assembly.shards()).initialized:
            prefix = self._models.message_prefix(model)
            raise Misuse(f"there is nothing to save: {prefix}the shard servers hold no parameters yet")
        return SavedModel(
            number=model.number,
            name=model.name,
            version=model.version,
            spec=spec,
            optimizer=model.optimizer,
            placement=model.holders.placement,
            committed=model.committed,
        )

    def report(self, rank: int, report: SnapshotReport) -> None:
        """Take a shard server's reply; ignore it if the order is not the current one.

        After a failure of one server the reports of the others are still awaited, so that their files can be removed.
        """
        save = self._save
        if save is None or report.id != save.order.id or rank not in save.waits_for:
            return
        if report.error is not None:
            save.error = save.error or type(report.error)(f"shard server {rank}: {report.error}")
        else:
            save.files[rank] = report.files
        self._settle({rank})

    def _settle(self, ranks: set[int]) -> None:
        """Await these servers no more; reply when no other server is awaited."""
        save = self._save
        assert save is not None
        save.waits_for -= ranks
        if not save.waits_for:
            self._save = None
            self._out.reply(
                save.call,
                Snapshot(
                    uri=save.order.uri,
                    files=tuple(f for r in sorted(save.files) for f in save.files[r]),
                    ranks=tuple(r for r in sorted(save.files) for _ in save.files[r]),
                    models=save.models,
                    error=save.error,
                ),
            )

    def lost(self, ranks: Sequence[int], reason: str) -> None:
        """Fail the checkpoint that lost shard servers were writing."""
        save = self._save
        if save is not None and save.waits_for & set(ranks):
            save.error = save.error or MemberLost(f"the checkpoint at {save.order.uri} was not written: {reason}")
            self._settle(set(ranks))

    def abandon(self, error: AxonError) -> None:
        """Fail the order in progress, since the parameters are being replaced."""
        if self._save is not None:
            self._out.reply(self._save.call, error)
            self._save = None

    def cancel(self, call: int) -> None:
        """Forget a call that its caller does not wait for any more. The files written get no manifest."""
        if self._save is not None and self._save.call == call:
            self._save = None

    @property
    def under_way(self) -> bool:
        """True if a checkpoint is being written."""
        return self._save is not None

    def pending(self) -> list[str]:
        """Return the reasons why a checkpoint is not complete, as text."""
        if self._save is None:
            return []
        return [f"the checkpoint at {self._save.order.uri} waits for shard server {format_ranks(self._save.waits_for)}"]
