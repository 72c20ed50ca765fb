"""Saving, restoring and replacing the parameters of a job's models, and information on a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from axon_ps.collectives.work import LoopWork
from axon_ps.coordinator.client.attachments import Attachments
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import Broken, InvalidRequest
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.files import absolute
from axon_ps.texts import value_of_json
from axon_ps.types import Array, Hyper
from axon_ps.wire.events import UPLOADED, SnapshotFile
from axon_ps.worker.job_view import JobView
from axon_ps.worker.models import Models
from axon_ps.worker.rendezvous import Rendezvous
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.view import ModelView

_LONGEST_BYTES = 2000
"""Most bytes of the description of a failure that the other workers get."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was written or read.

    Attributes:
        uri: its URI.
        version: the version it holds.
        bytes: bytes of all its files.
        extra: the JSON values saved with it.
        versions: if it has several models, the version of each by name.
        optimizer: if it was read: name of the optimizer of the first model requested; empty = it has none.
        hyper: per parameter group of that optimizer, its hyperparameters then.
        states: if it was read: by the rank of a worker, the file of its own state.
    """

    uri: str
    version: int
    bytes: int
    extra: Mapping[str, Any]
    versions: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""
    hyper: Sequence[Hyper] = ()
    states: Mapping[int, FileEntry] = field(default_factory=dict)


def info_of(reply: Any) -> CheckpointInfo:
    """Return a reply of the coordinator as a `CheckpointInfo`."""
    return CheckpointInfo(
        uri=reply.uri,
        version=reply.version,
        bytes=reply.bytes,
        extra=value_of_json(reply.extra_json, "the checkpoint's extra") if reply.extra_json else {},
        versions=dict(reply.versions),
        optimizer=reply.optimizer,
        hyper=reply.hyper,
        states={f.model: FileEntry(name=f.name, sha256=f.sha256, bytes=f.bytes) for f in reply.states},
    )


def info_to_json(info: CheckpointInfo) -> dict[str, Any]:
    """Return a `CheckpointInfo` as JSON values."""
    return {**asdict(info), "states": {str(rank): asdict(entry) for rank, entry in info.states.items()}}


def info_from_json(value: Mapping[str, Any]) -> CheckpointInfo:
    """Return a `CheckpointInfo` from JSON values."""
    states = {int(rank): FileEntry(**entry) for rank, entry in value["states"].items()}
    return CheckpointInfo(**{**value, "states": states})


class Checkpoints:
    """The saving, restoring and replacing of one worker; see the methods of `World`.

    Args:
        loop: the background loop.
        coordinator: the session.
        view: the members.
        models: those of the job in this process.
        rendezvous: the barriers of the workers.
        attachments: those that the worker of lowest rank adds to its checkpoints.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        coordinator: CoordinatorClient,
        view: JobView,
        models: Models,
        rendezvous: Rendezvous,
        attachments: Attachments,
    ) -> None:
        self._attachments = attachments
        self._loop = loop
        self._coordinator = coordinator
        self._view = view
        self._models = models
        self._rendezvous = rendezvous

    def save(
        self,
        uri: str,
        extra: Mapping[str, Any] | None,
        timeout_s: float,
        *,
        states: Mapping[int, FileEntry] | None = None,
        background: bool,
    ) -> Coroutine[Any, Any, CheckpointInfo]:
        """See `World.save_checkpoint`; to be run on the loop."""
        try:
            extra_json = json.dumps(dict(extra or {}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"extra must be JSON values: {error}") from error

        attached = self._attachments.current() if self._is_first else {}
        files = tuple(SnapshotFile(**vars(entry), model=rank) for rank, entry in (states or {}).items())

        async def save() -> CheckpointInfo:
            for key, attachment in attached.items():
                await self._attachments.store(key, attachment)
            return info_of(
                await self._coordinator.save_checkpoint(
                    absolute(uri), extra_json, timeout_s=timeout_s, states=files, background=background
                )
            )

        return save()

    def restore(self, uri: str, models: Sequence[str], timeout_s: float) -> CheckpointInfo:
        """See `World.restore_checkpoint`."""
        deadline = Deadline(timeout_s)
        before = self._epochs(models)
        restoring = self._coordinator.restore_checkpoint(absolute(uri), timeout_s=deadline.remaining(), models=models)
        info = self._loop.run(restoring)
        for model, epoch in before:
            model.wait_epoch(epoch + 1, deadline.remaining())
        return info_of(info)

    def _epochs(self, models: Sequence[str] = ()) -> list[tuple[ModelView, int]]:
        """Return the epoch of every model wrapped by this process, or of those named; of model 0 without any."""
        clients = [self._models.named(name) for name in models] if models else self._models.wrapped
        return [(client.view, client.view.epoch) for client in clients or [self._models.client(0)]]

    def resume(self, uri: str, timeout_s: float) -> None:
        """See `World.resume_checkpoint`."""
        deadline = Deadline(timeout_s)
        while waited := [model for model, epoch in self._epochs() if epoch == 0]:
            now = self._view.membership.generation
            if self._is_first:
                self.restore(uri, (), deadline.remaining())
            else:  # if the worker that restores dies, this one may have to restore
                waited[0].wait_epoch_or_generation(1, now + 1, deadline.remaining())
        for model, _ in self._epochs():
            model.wait_epoch(1, deadline.remaining())

    def replace(self, units: Iterable[tuple[int, Array]], model: str, timeout_s: float) -> None:
        """See `World.replace_parameters`."""
        steps = self._models.named(model) if model else self._models.only()
        view, epoch = steps.view, steps.view.epoch
        self._rendezvous.barrier("axon_ps/replace_parameters", timeout_s)
        failure: Exception | None = None
        first = self._view.membership.first_worker
        mates = () if view.spec is None or first is None else view.spec.grouping.row_of(first.rank)
        if self._is_first or self._coordinator.rank in mates:
            try:
                self._upload(units, steps, epoch + 1, timeout_s)
            except Exception as error:
                failure = error
        reported = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode()[:_LONGEST_BYTES]
        found = self._rendezvous.all_gather(f"axon_ps/replaced/{view.name}", reported, timeout_s)
        if failure is not None:
            raise failure
        if problem := next(filter(None, found), b""):
            raise Broken(
                f"the worker of lowest rank could not replace the parameters: {problem.decode(errors='replace')}; the "
                "shard servers may lack values: replace them again, or restore a checkpoint"
            )
        view.wait_epoch(epoch + 1, timeout_s)

    def _upload(self, units: Iterable[tuple[int, Array]], steps: StepClient, epoch: int, timeout_s: float) -> None:
        """Begin an epoch on the servers, if this is the worker of lowest rank, and upload its values."""
        view, replaced = steps.view, None
        if self._is_first:
            replaced = LoopWork(
                self._loop,
                self._coordinator.restore_checkpoint(UPLOADED, timeout_s=timeout_s, models=[view.name]),
                "replacing the parameters",
            )
        view.wait_epoch(epoch, timeout_s, initialized=False)
        for unit, values in units:
            steps.parameters.upload(unit, values, epoch=epoch)
        if replaced is not None:
            replaced.wait(timeout_s)

    @property
    def _is_first(self) -> bool:
        """True if this is the worker of lowest rank of those in a replica."""
        first = self._view.membership.first_worker
        return first is not None and first.rank == self._coordinator.rank
