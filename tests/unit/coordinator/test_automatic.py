"""Checkpoints are written when due, and restored after a loss. Tests of `coordinator/server/automatic.py`."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.server.automatic import AutomaticCheckpoints
from axon_ps.coordinator.server.checkpoint_log import CheckpointLog
from axon_ps.errors import AxonError, Busy, StorageFull
from axon_ps.sharding.layout import Layout
from axon_ps.storage.manifest import Manifest, write_manifest
from axon_ps.types import OptimizerSpec
from axon_ps.wire.events import FIRST_VALUES, CheckpointReply, RestoreOrder
from coordinator_driver import LAYOUT, OPTIMIZER, SPEC, Driver, Peer
from deadlines import HANG_S
from shard_files import put_files


def write(uri: str, version: int, layout: Layout = LAYOUT, optimizer: OptimizerSpec | None = OPTIMIZER) -> None:
    """Write a checkpoint, of the driver's model if nothing else is given; those of later versions are newer."""
    manifest = Manifest(
        job="job",
        name="model 0",
        version=version,
        layout=layout,
        optimizer=optimizer,
        num_servers=1,
        options=SPEC.options,
        files=(),
        created=f"2026-01-02T03:04:{version:02d}+00:00",
    )
    write_manifest(uri, put_files(uri, manifest))


def damage(uri: str | Path) -> None:
    """Change the last bit of a file of values."""
    (file,) = Path(uri).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


class Job:
    """A job whose checkpoints are automatic, looked at when a test says so."""

    def __init__(self, directory: Path, *, every_steps: int = 2, limit: int = 3, **config: Any) -> None:
        self.driver = Driver(**config)
        self.workers, (self.server,) = self.driver.assembled()
        self.directory = directory
        self.saved: list[str] = []
        self.errors: list[AxonError] = []
        self.damages = False
        self.state = self.driver.state
        self.checkpoints = CheckpointLog(self.driver.clock, lambda kind, text: None)
        self._looked: asyncio.Queue[float] = asyncio.Queue()
        self._go = asyncio.Semaphore(0)
        shell: Any = self
        policy = CheckpointPolicy(directory=str(directory), every_steps=every_steps, limit=limit)
        self.automatic = AutomaticCheckpoints(shell, policy, self._save)

    async def _save(self, uri: str, extra: str) -> CheckpointReply:
        if self.errors:
            raise self.errors.pop(0)
        version = self.driver.state.status().version
        write(uri, version)
        if self.damages:
            damage(uri)
        self.saved.append(Path(uri).name)
        return CheckpointReply(uri=uri, version=version)

    def now(self) -> float:
        return self.driver.clock()

    def perform(self, actions: list[Action]) -> None:
        self.driver.perform(actions)

    async def call(self, event: Callable[[int], list[Action]]) -> Any:
        number = self.driver.next_session()
        self.driver.perform(event(number))
        while number not in self.driver.replies:
            await asyncio.sleep(0)
        if isinstance(answer := self.driver.replies[number], AxonError):
            raise answer
        return answer

    async def changed(self, timeout_s: float) -> None:
        self._looked.put_nowait(timeout_s)
        await self._go.acquire()

    async def look(self) -> float:
        """Have it do what is due; returns the seconds that it then waits for an event."""
        self._go.release()
        return await self._looked.get()

    def step(self) -> None:
        self.server.ready()
        for worker in self.workers:
            worker.vote()

    def lose_values(self) -> Peer:
        self.server.lose()
        self.server = self.driver.shard()
        return self.server

    async def restored(self) -> tuple[str, int]:
        """Lose the values, and get those of a checkpoint: its URI and version."""
        server = self.lose_values()
        looking = asyncio.create_task(self.look())
        while not server.received(RestoreOrder):
            await asyncio.sleep(0)
        order = server.last(RestoreOrder)
        assert self.checkpoints.status().activity.startswith("restoring: ")
        server.initialized(version=order.version, epoch=order.epoch)
        await looking
        return order.uri, order.version

    @property
    def there(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


def run(body: Callable[[Job], Awaitable[None]], directory: Path, **options: Any) -> None:
    async def test() -> None:
        job = Job(directory, **options)
        running = asyncio.create_task(job.automatic.run())
        try:
            await asyncio.wait_for(job._looked.get(), HANG_S)
            await asyncio.wait_for(body(job), HANG_S)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(test())


def name_of(version: int) -> str:
    return f"step-{version:010d}"


def test_a_checkpoint_is_written_when_it_is_due_and_the_oldest_is_removed(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        for version in range(1, 7):
            assert job.checkpoints.status().activity == f"the next one is due in {1 + version % 2} steps"
            job.step()
            await job.look()
            assert len(job.saved) == version // 2
        assert job.saved == [name_of(version) for version in (2, 4, 6)]
        assert job.there == [name_of(4), name_of(6)]

    run(body, tmp_path, limit=2)


def test_one_that_cannot_be_written_is_tried_again_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(job: Job) -> None:
        job.errors = [StorageFull("the disk is full"), Busy("a checkpoint is being written")]
        job.step(), job.step()
        assert await job.look() == 1.0
        assert job.checkpoints.status().failure == "the disk is full"
        assert job.checkpoints.status().activity == "trying again in 1 s"
        job.driver.clock.advance(0.5)
        assert await job.look() == 0.5
        assert len(job.errors) == 1, "it is too early"
        job.driver.clock.advance(0.5)
        assert await job.look() == 2.0
        assert job.checkpoints.status().failure == "the disk is full", "a busy job is no failure"
        job.driver.clock.advance(2.0)
        await job.look()
        assert job.there == [name_of(2)]

    with caplog.at_level(logging.INFO):
        run(body, tmp_path)
    tried = {r.message: r.levelno for r in caplog.records if "trying again" in r.message}
    assert tried == {
        "the disk is full; trying again after 1 s": logging.ERROR,
        "a checkpoint is being written; trying again after 2 s": logging.INFO,
    }


def test_one_that_is_damaged_when_it_was_written_is_removed(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        job.damages = True
        job.step(), job.step()
        assert await job.look() == 1.0
        assert name_of(2) in job.checkpoints.status().failure
        assert not list(tmp_path.rglob("manifest.json"))

    run(body, tmp_path)


def test_the_newest_checkpoint_is_restored_after_a_loss(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        for _ in range(4):
            job.step()
            await job.look()
        assert await job.restored() == (str(tmp_path / name_of(4)), 4)
        await job.look()
        assert job.checkpoints.status().activity == "the next one is due in 2 steps"
        assert job.state.status().version == 4

    run(body, tmp_path)


def test_one_that_cannot_be_restored_is_passed_over_once_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(str(tmp_path / name_of(2)), 2)
    write(str(tmp_path / name_of(4)), 4)
    (tmp_path / name_of(4) / "manifest.json").write_text("{}")
    write(str(tmp_path / name_of(6)), 6, Layout(units=LAYOUT.units[:1]), None)

    async def body(job: Job) -> None:
        for _ in range(2):
            assert await job.restored() == (str(tmp_path / name_of(2)), 2)

    run(body, tmp_path)
    passed_over = [r.message for r in caplog.records if "is passed over" in r.message]
    assert [name_of(4) in passed_over[0], name_of(6) in passed_over[1], len(passed_over)] == [True, True, 2]


def test_a_job_that_lost_everything_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        server = job.lose_values()
        await job.look()
        assert server.last(RestoreOrder).uri == FIRST_VALUES

    run(body, tmp_path)


def test_a_directory_that_is_gone_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        job.step(), job.step()
        await job.look()
        shutil.rmtree(job.directory)
        server = job.lose_values()
        await job.look()
        assert not server.received(RestoreOrder)
        assert f"{job.directory} has no checkpoint that can be restored" in job.checkpoints.status().failure

    run(body, tmp_path / "checkpoints")


def test_a_job_that_writes_none_goes_back_to_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    write(str(tmp_path / "mine"), 7)

    async def body(job: Job) -> None:
        assert await job.restored() == (str(tmp_path / "mine"), 7)

    run(body, tmp_path / "checkpoints", every_steps=0, resume=str(tmp_path / "mine"))
