"""Checkpoints being written: one order at a time, reports of all shard servers, one answer. Pure.

The answer names every file; writing the manifest, which makes the directory a checkpoint, is the shell's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.errors import AxonError, Busy, MemberLost
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.types import ModelProgress, OptimizerSpec
from axon_ps.wire.events import SnapshotFile, SnapshotOrder, SnapshotReport


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model in a checkpoint.

    Attributes:
        number: its number in the job.
        name: what it is called.
        version: the version written.
        spec: its layout.
        optimizer: its optimizer, if it has one.
        placement: whose primaries write it.
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
    """A checkpoint whose files are all written, except for the manifest; or the files of one that failed.

    Attributes:
        uri: where.
        files: of all shard servers, in rank order.
        ranks: per file, the shard server that wrote it.
        models: what is in it, by number.
        error: why it is incomplete; then `files` are to be removed.
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
        out: gets the answers.
    """

    def __init__(self, last_id: int, out: Outbox) -> None:
        self.last_id = last_id
        self._out = out
        self._save: _Save | None = None

    def check_free(self) -> None:
        """Refuse a second order.

        Raises:
            Busy: one is in progress.
        """
        if self._save is not None:
            raise Busy(f"a checkpoint is being written to {self._save.order.uri} already; try again when it is done")

    def begin(
        self, call: int, uri: str, ranks: Sequence[int], models: Sequence[SavedModel], *, background: bool
    ) -> SnapshotOrder:
        """The order for a new checkpoint of `models`; in the `background` if it is not waited for."""
        self.last_id += 1
        version = next((m.version for m in models if m.number == 0), 0)
        others = [ModelProgress(model=m.number, step=0, version=m.version) for m in models if m.number]
        order = SnapshotOrder(id=self.last_id, uri=uri, version=version, models=tuple(others), background=background)
        self._save = _Save(call, order, tuple(models), set(ranks))
        return order

    def report(self, rank: int, report: SnapshotReport) -> None:
        """A shard server's reply; ignored if the order is not the current one.

        When one server fails, the others are waited for all the same, so that their files can be removed.
        """
        save = self._save
        if save is None or report.id != save.order.id or rank not in save.waits_for:
            return
        if report.error is not None:
            save.error = save.error or _at(rank, report.error)
        else:
            save.files[rank] = report.files
        self._settle({rank})

    def _settle(self, ranks: set[int]) -> None:
        """These servers will write nothing more; reply once no other server is awaited."""
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
        """Shard servers are lost: the checkpoint that they were writing stays incomplete."""
        save = self._save
        if save is not None and save.waits_for & set(ranks):
            save.error = save.error or MemberLost(f"the checkpoint at {save.order.uri} was not written: {reason}")
            self._settle(set(ranks))

    def abandon(self, error: AxonError) -> None:
        """The parameters are being replaced: fail the order in progress."""
        if self._save is not None:
            self._out.reply(self._save.call, error)
            self._save = None

    def cancel(self, call: int) -> None:
        """The caller does not wait any more; the files written get no manifest."""
        if self._save is not None and self._save.call == call:
            self._save = None

    @property
    def under_way(self) -> bool:
        """Whether one is being written."""
        return self._save is not None

    def pending(self) -> list[str]:
        """The reasons why a checkpoint waits, as text."""
        if self._save is None:
            return []
        return [f"the checkpoint at {self._save.order.uri} waits for shard server {format_ranks(self._save.waits_for)}"]


def _at(rank: int, error: AxonError) -> AxonError:
    """The error of a shard server, naming it."""
    named = type(error)(f"shard server {rank}: {error}")
    return named
