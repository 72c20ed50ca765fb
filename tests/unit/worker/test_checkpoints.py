"""A worker orders checkpoints, and replaces parameters with all others. Tests of `worker/checkpoints.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import AxonError, Broken, InvalidRequest, Timeout
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Array, Member, Membership, Role
from axon_ps.wire.events import UPLOADED, CheckpointReply, JobState, SnapshotFile
from axon_ps.worker.checkpoints import CheckpointInfo, Checkpoints, info_from_json, info_of, info_to_json
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.view import ModelView

STATE = FileEntry(name="worker-3", sha256="a" * 64, bytes=7)


class Job:
    """A worker with two models; the servers hold what is restored or uploaded."""

    def __init__(self, loop: BackgroundLoop, rank: int = 0) -> None:
        workers = tuple(Member(role=Role.WORKER, rank=r, incarnation=str(r), node="n", replica=r) for r in (0, 1))
        self.job = JobView(lambda: str(rank), 0.0)
        self.job.known = Membership(
            generation=1, step=1, version=0, workers=workers, shards=(), num_replicas=2, complete=True
        )
        self.rank = rank
        self.views = [ModelView(self.job, model) for model in (0, 1)]
        for view, name in zip(self.views, ("policy", "critic"), strict=True):
            view.name = name
        self.calls: list[Any] = []
        self.reports: list[bytes] = [b""]
        self.upload_error: AxonError | None = None
        self.on_restore: Callable[[], None] = lambda: None
        clients = [SimpleNamespace(view=view, parameters=self) for view in self.views]
        models: Any = SimpleNamespace(
            wrapped=clients, only=lambda: clients[0], named={"policy": clients[0], "critic": clients[1]}.__getitem__
        )
        attachments: Any = SimpleNamespace(current=lambda: {"buffers": "new"}, store=self._store)
        rendezvous: Any = SimpleNamespace(barrier=self._barrier, all_gather=self._all_gather)
        coordinator: Any = self
        self.checkpoints = Checkpoints(loop, coordinator, self.job, models, rendezvous, attachments)

    async def _store(self, key: str, attachment: str) -> None:
        self.calls.append(("attach", key, attachment))

    def _barrier(self, name: str, timeout_s: float) -> None:
        self.calls.append(name)

    def _all_gather(self, name: str, value: bytes, timeout_s: float) -> list[bytes]:
        self.calls.append(name)
        return [value] if self.rank == 0 else self.reports

    def upload(self, unit: int, values: Array, *, epoch: int) -> None:
        if self.upload_error is not None:
            raise self.upload_error
        self.calls.append(("upload", unit, values.tolist(), epoch))

    def replaced(self, *models: str) -> None:
        with self.job.changed:
            for view in self.views:
                if not models or view.name in models:
                    view.on_state(JobState(epoch=view.epoch + 1, initialized=True))
            self.job.changed.notify_all()

    async def save_checkpoint(
        self, uri: str, extra_json: str, *, timeout_s: float, states: Sequence[SnapshotFile], background: bool
    ) -> CheckpointReply:
        self.calls.append(("save", uri, json.loads(extra_json), list(states), background))
        return CheckpointReply(uri=uri, version=4)

    async def restore_checkpoint(self, uri: str, *, timeout_s: float, models: Sequence[str]) -> CheckpointReply:
        self.calls.append(("restore", uri, list(models)))
        self.on_restore()
        return CheckpointReply(uri=uri, version=4)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop("test") as made:
        yield made


def test_a_description_of_a_checkpoint_comes_back_equal_from_json() -> None:
    info = CheckpointInfo(
        uri="/run/step-4",
        version=4,
        bytes=9,
        extra={"epoch": 2},
        versions={"policy": 4},
        optimizer="adamw",
        hyper=[{"lr": 0.1}],
        states={3: STATE},
    )
    assert info_from_json(json.loads(json.dumps(info_to_json(info)))) == info


def test_a_reply_names_the_states_of_workers_by_rank() -> None:
    reply = CheckpointReply(
        uri="/run", version=4, bytes=9, extra_json='{"epoch": 2}', states=(SnapshotFile(**vars(STATE), model=3),)
    )
    info = info_of(reply)
    assert (info.extra, info.states, info.version) == ({"epoch": 2}, {3: STATE}, 4)
    assert info_of(CheckpointReply(uri="/run", version=4)).extra == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_worker_of_lowest_rank_attaches_what_it_has(rank: int, loop: BackgroundLoop, tmp_path: Path) -> None:
    job = Job(loop, rank)
    saving = job.checkpoints.save(str(tmp_path), {"epoch": 2}, 5.0, states={3: STATE}, background=True)
    assert asyncio.run(saving).version == 4
    *attached, saved = job.calls
    assert attached == ([("attach", "buffers", "new")] if rank == 0 else [])
    assert saved == ("save", str(tmp_path), {"epoch": 2}, [SnapshotFile(**vars(STATE), model=3)], True)


def test_values_that_json_does_not_have_are_refused(loop: BackgroundLoop) -> None:
    with pytest.raises(InvalidRequest, match="extra must be JSON values"):
        Job(loop).checkpoints.save("/run", {"epoch": object()}, 5.0, background=False)


def test_a_restore_returns_when_this_worker_knows_of_it(loop: BackgroundLoop) -> None:
    job = Job(loop)
    with pytest.raises(Timeout, match=r"the parameters were not replaced for the 1\. time"):
        job.checkpoints.restore("/run", (), 0.0)
    job.on_restore = lambda: job.replaced("critic")
    assert job.checkpoints.restore("/run", ["critic"], 5.0).uri == "/run"
    assert job.calls[-1] == ("restore", "/run", ["critic"])
    assert [view.asked_epoch for view in job.views] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_is_resumed_once_by_the_worker_of_lowest_rank(rank: int, loop: BackgroundLoop) -> None:
    job = Job(loop, rank)
    job.on_restore = job.replaced
    if rank:
        with pytest.raises(Timeout):
            job.checkpoints.resume("/run", 0.0)
        job.replaced()
    job.checkpoints.resume("/run", 5.0)
    job.checkpoints.resume("/run", 5.0)
    assert job.calls == ([] if rank else [("restore", "/run", [])])


def test_a_worker_that_becomes_the_first_resumes_the_job(loop: BackgroundLoop) -> None:
    job = Job(loop, 1)
    job.on_restore = job.replaced
    known = job.job.membership
    job.job.known = Membership(**{**vars(known), "generation": 2, "workers": known.workers[1:]})
    job.checkpoints.resume("/run", 5.0)
    assert job.calls == [("restore", "/run", [])]


def test_one_worker_uploads_values_in_the_place_of_others(loop: BackgroundLoop) -> None:
    job = Job(loop)
    job.on_restore = lambda: job.replaced("critic")
    job.checkpoints.replace([(0, np.ones(2, np.float32)), (1, np.zeros(1, np.float32))], "critic", 5.0)
    assert job.calls == [
        "axon_ps/replace_parameters",
        ("restore", UPLOADED, ["critic"]),
        ("upload", 0, [1.0, 1.0], 1),
        ("upload", 1, [0.0], 1),
        "axon_ps/replaced/critic",
    ]


def test_every_worker_learns_that_values_could_not_be_replaced(loop: BackgroundLoop) -> None:
    first, other = Job(loop), Job(loop, 1)
    first.on_restore = first.replaced
    first.upload_error = InvalidRequest("of another shape")
    with pytest.raises(InvalidRequest, match="of another shape"):
        first.checkpoints.replace([(0, np.ones(2, np.float32))], "", 5.0)
    assert first.calls[-1] == "axon_ps/replaced/policy", "the others were told"
    other.reports = [b"InvalidRequest: of another shape", b""]
    with pytest.raises(Broken, match="could not replace the parameters: InvalidRequest: of another shape"):
        other.checkpoints.replace([], "", 5.0)
    assert not any(call[0] == "upload" for call in other.calls)
