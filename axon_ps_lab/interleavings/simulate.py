"""Simulates a job under faults: `python -m axon_ps_lab.interleavings --seeds 0:100`.

All delays and faults follow from a seed. The same seed gives the same trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import gc
import os
import random
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

from axon_ps.coordinator.server import automatic, manifests
from axon_ps.host import memory, priority
from axon_ps.rpc import deadlines
from axon_ps.shard.server import apply, capacity, model_shell, shell
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.shell import ShardShell
from axon_ps_lab.faults.bit_flips import flip_in
from axon_ps_lab.interleavings.collectives import small
from axon_ps_lab.interleavings.job import ROWS, Job, Violation
from axon_ps_lab.interleavings.network import DELAY_S, Network
from axon_ps_lab.interleavings.virtual_loop import LoopExecutor, VirtualCondition, VirtualLoop, process

LENGTHS: Final = (*((4, 3.5),) * 60, *((8, 6.0),) * 8, (20, 12.0), (20, 12.0))
"""Versions to commit, and seconds with faults; after them everything is started, healed and quick. Most are short: bugs
are found soon, if at all, and more seeds have more beginnings."""

QUEUES = (0, 64, 1 << 20)
"""Bytes that a shard server has for queued gradients: none, too few, enough."""
CHECKPOINTS: Final = 0.1
"""The fraction of the jobs in which checkpoints are written."""

ONE_WAY: Final = 0.3
"""The fraction of the cut links that still carry messages the other way."""

END_S: Final = 600.0
"""The most seconds that a job may take."""


class Faults:
    """Random faults, and their ends. Each has its own randomness: it is the same when others are left out.

    Args:
        job: the job that they happen to.
        network: its `faults` counts them, with those that are left out.
        rng: source of all random choices.
        last_s: seconds in which they happen.
        only: the numbers of those that happen; None = all.
    """

    def __init__(
        self, job: Job, network: Network, rng: random.Random, last_s: float, only: Collection[int] | None
    ) -> None:
        self._job, self._network, self._rng, self._last_s = job, network, rng, last_s
        self._only = only
        self._ends: list[Any] = []
        self._over = False
        self._cuts: set[frozenset[str]] = set()

    async def run(self) -> None:
        """Cause a fault every few seconds, up to `last_s`, and then end all."""
        loop, rng = self._job.loop, random.Random(self._rng.random())
        until_s = loop.time() + self._last_s
        early = rng.choice((0, 0, 8))  # faults while the job forms
        while loop.time() < until_s and not self._job.ends:
            early -= 1
            await asyncio.sleep(0.03 * rng.random() if early > 0 else rng.choice((0.05, 0.5, 2.0, 6.0)) * rng.random())
            self._rng = random.Random(rng.random())
            if self._only is None or self._network.faults in self._only:
                self._one()
            self._network.faults += 1
        self._over = True
        for end in self._ends:
            end()

    def _one(self) -> None:
        """Cause a fault now, or after some messages of a member."""
        rng = self._rng
        if rng.random() < 0.5:
            faults = (self._kill, self._kill, self._cut, self._reset, self._slow, self._flip, self._fail_disk)
            rng.choice(faults)(*self._pair())
            return
        one, other = self._pair()
        fault = rng.choice((self._kill, self._cut, self._reset, self._flip))
        messages = int(rng.choice((3, 10, 40, 200)) * rng.random()) + 1

        def run() -> None:
            if not self._over:
                self._rng = rng
                fault(one, other)

        self._network.once_busy(messages, one, run)

    def _later(self, most_s: float, end: Any) -> None:
        """End a fault after a while, or when all faults end."""
        done: list[bool] = []

        def once() -> None:
            if not done:
                done.append(True)
                end()

        self._ends.append(once)
        self._job.loop.call_later(self._rng.uniform(0.0, most_s), once)

    def _kill(self, role: str, _other: str) -> None:
        if self._job.ends or role not in self._job.names or (role.startswith("shard") and not self._may_lose(role)):
            return
        self._job.kill(role)
        if role == "coordinator":
            self._hurt_disk()
        self._later(self._rng.choice((0.2, 3.0, 10.0)), lambda: self._job.start(role))

    def _hurt_disk(self) -> None:
        """Lose all of the coordinator's disk, or its last batches, or nothing."""
        chance = self._rng.random()
        if chance < 0.1 and not self._job.is_trained:
            self._network.note("coordinator loses its disk")
            self._job.lose_disk()
        elif 0.1 <= chance < 0.4 and self._job.older_disk(lost := self._rng.choice((1, 3, 10, 30))):
            self._network.note(f"the coordinator's disk has lost the end of it: {lost} batches")

    def _fail_disk(self, _role: str, _other: str) -> None:
        self._network.note("the coordinator's disk fails")
        self._job.disk.fails = True

    def _may_lose(self, role: str) -> bool:
        """Return True if a shard server may be lost: there are checkpoints, or no other one is lost or cut off.

        A state that has lost its end needs the shard servers that know it; see Note: [An older state].
        """
        if self._job.is_older:
            return False
        if self._job.directory:
            return True
        return self._job.is_safe and not {r for link in self._cuts for r in link if r.startswith("shard")} - {role}

    def _pair(self) -> tuple[str, str]:
        one, other = self._rng.sample(self._job.roles, 2)
        return one, other

    def _cut(self, one: str, other: str) -> None:
        link = frozenset((one, other))
        shards = [r for r in link if r.startswith("shard")]
        if link in self._cuts or (shards and not all(self._may_lose(r) for r in shards)):
            return
        one_way = self._rng.random() < ONE_WAY
        self._network.note(f"cut {one} {other}" + (", one way" if one_way else ""))
        self._network.cut(one, other, one_way=one_way)
        self._cuts.add(link)

        def heal() -> None:
            self._cuts.discard(link)
            self._network.heal(one, other)

        self._later(self._rng.choice((1.0, 8.0, 25.0)), heal)

    def _reset(self, one: str, other: str) -> None:
        if "coordinator" in (one, other) and self._job.is_changed and not self._job.directory:
            return  # a step may be committed before it is back, and changed memory be its only copy
        self._network.note(f"reset {one} {other}")
        self._network.reset(one, other)

    def _flip(self, role: str, _other: str) -> None:
        if not (role.startswith("shard") and role in self._job.names and self._may_lose(role)):
            return
        if (flip := flip_in(self._job.slices_of(role), self._rng)) is not None:
            self._network.struck()
            self._network.note(f"{self._job.names[role]}: {flip}")

    def _slow(self, one: str, other: str) -> None:
        delay_s = self._rng.choice((0.02, 0.3))
        self._network.note(f"slow {one} {other} {delay_s}")
        self._network.slow(one, other, delay_s)
        self._later(10.0, lambda: self._network.slow(one, other, DELAY_S))


@contextlib.contextmanager
def virtual(loop: VirtualLoop, network: Network, rng: random.Random) -> Iterator[None]:
    """Give this process the loop's time, and the generator's randomness."""
    ids = random.Random(rng.random())

    def uuid4() -> uuid.UUID:
        made = uuid.UUID(int=ids.getrandbits(128), version=4)
        network.ids.setdefault(process.get(), []).append(made.hex)
        return made

    def shard_shell(*args: Any) -> ShardShell:
        made = network.shells[process.get()] = ShardShell(*args)
        return made

    def condition() -> VirtualCondition:
        return VirtualCondition(loop)

    def seeded(seed: Any = None) -> random.Random:
        return random.Random(ids.random() if seed is None else seed)

    with contextlib.ExitStack() as stack:
        for patched in (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(time, "perf_counter", loop.time),
            mock.patch.object(uuid, "uuid4", uuid4),
            mock.patch.object(deadlines.Deadline.__init__, "__defaults__", (loop.time,)),
            mock.patch.object(deadlines, "random", SimpleNamespace(Random=seeded)),
            mock.patch.object(apply, "ThreadPoolExecutor", LoopExecutor),
            mock.patch.object(shard_server, "ShardShell", shard_shell),
            mock.patch.object(model_shell, "warm_up"),  # this process has compiled it all
            mock.patch.object(memory, "_pools", return_value=[("of the simulation", 1 << 40)]),
            mock.patch.object(shell, "process_measures", return_value={}),
            mock.patch.object(capacity, "resident_bytes", return_value=1 << 30),
            mock.patch.object(priority.Throttle, "rest"),
            mock.patch.object(os, "fsync"),
            mock.patch.object(apply, "threading", SimpleNamespace(Condition=condition, Lock=threading.Lock)),
            mock.patch.object(manifests, "datetime", _virtual_date(loop)),
            mock.patch.object(automatic, "datetime", _virtual_date(loop)),
            network.installed(),
            small(),
        ):
            stack.enter_context(patched)
        yield


def simulate(seed: int, only: Collection[int] | None = None, *, rows: bool = False) -> list[str]:
    """Simulate a job; returns its trace.

    Args:
        seed: seed of all delays and faults.
        only: the numbers of the faults that happen; None = all.
        rows: the job has two replicas of two workers each, which push different units.

    Raises:
        AssertionError: something does not hold. Any error has the trace and the number of faults as attributes.
    """
    with _own_garbage():
        return _simulate(seed, only, rows=rows)


_frozen_before = functools.cache(gc.get_freeze_count)
"""The number of objects that were frozen before the first seed; counting them takes milliseconds."""


@contextlib.contextmanager
def _own_garbage() -> Iterator[None]:
    """Collect garbage once, of the body's objects only; automatic collections took a seventh of the time."""
    enabled, frozen = gc.isenabled(), _frozen_before()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:  # else other code wants its objects to stay frozen
            gc.unfreeze()
        if enabled:
            gc.enable()


def _simulate(seed: int, only: Collection[int] | None, *, rows: bool) -> list[str]:
    rng = random.Random(seed)
    loop = VirtualLoop(random.Random(rng.random()))
    network = Network(loop)
    asyncio.set_event_loop(loop)
    try:
        with virtual(loop, network, rng):
            loop.run_until_complete(_simulated(loop, network, rng, only, rows=rows))
            network.note("over")
    except Exception as error:
        error.trace, error.faults = network.trace, network.faults  # type: ignore[attr-defined]
        raise
    finally:
        loop.set_exception_handler(lambda *_: None)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(Exception):
            loop.run_until_complete(asyncio.sleep(1))
        asyncio.set_event_loop(None)
        loop.close()
    return network.trace


def shortest(seed: int, error: Exception, *, rows: bool = False) -> tuple[int, Exception]:
    """Return the number of faults with which a seed still fails, and its error with those alone.

    Faults are left out, half of them, then a quarter, ..., as long as it still fails (Zeller & Hildebrandt 2002,
    "Simplifying and isolating failure-inducing input"; not necessarily the least number).
    """
    needed, size = list(range(error.faults)), error.faults  # type: ignore[attr-defined]
    while size > 1:
        size = (size + 1) // 2
        for begin in range(0, len(needed), size):
            fewer = needed[:begin] + needed[begin + size :]
            try:
                simulate(seed, only=fewer, rows=rows)
            except Exception as found:
                needed, error = fewer, found
                break
        else:
            continue
        size = min(2 * size, len(needed))
    return len(needed), error


def _virtual_date(loop: VirtualLoop) -> Any:
    """Return a stand-in for the module `datetime`, for checkpoints."""

    class Now(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return cls.fromtimestamp(loop.time(), tz)

    return SimpleNamespace(datetime=Now, UTC=datetime.UTC)


async def _simulated(
    loop: VirtualLoop, network: Network, rng: random.Random, only: Collection[int] | None, *, rows: bool
) -> None:
    steps, faults_s = rng.choice(LENGTHS)
    workers, shards, collectives = rng.choice((1, 2, 3)), rng.choice((2, 3)), rng.random() < 0.4
    queue_bytes = rng.choice(QUEUES)
    more: dict[str, Any] = {}
    if rows:
        workers, collectives = 4, False
        more = {"grouping": ROWS, "min_workers": rng.choice((None, 1, 2))}
    with (
        tempfile.TemporaryDirectory()
        if rng.random() < CHECKPOINTS and not rows
        else contextlib.nullcontext("") as directory
    ):
        loop.threads = bool(directory)
        job = Job(
            loop,
            network,
            workers=workers,
            shards=shards,
            steps=steps,
            queue_bytes=queue_bytes,
            collectives=collectives,
            directory=directory,
            **more,
        )
        await _run(loop, network, job, Faults(job, network, rng, faults_s, only))


async def _run(loop: VirtualLoop, network: Network, job: Job, random_faults: Faults) -> None:
    """Run a job until its workers have made all steps, after the last fault."""
    found: list[BaseException] = []
    loop.set_exception_handler(
        lambda _, context: found.append(context.get("exception") or Violation(context["message"]))
    )
    for role in job.roles:
        job.start(role)
    faults = loop.create_task(random_faults.run())
    end_s = loop.time() + END_S
    while True:
        await asyncio.sleep(0.5)
        if found:
            raise Violation(f"unseen: {found[0]!r}") from found[0]
        if faults.done():
            faults.result()
        for role, name in list(job.names.items()):
            if job.tasks[role].done() and (error := job.tasks[role].exception()) is not None:
                if not job.may_end(name, error):
                    raise Violation(f"{name} ended: {error!r}") from error
                network.note(f"{name} was given up: {error}")
                job.kill(role)
                job.start(role)
        if faults.done() and job.is_stuck:
            network.note("somebody starts the job anew")
            for role in job.roles:
                if role in job.names:
                    job.kill(role)
            job.lose_disk()
            for role in job.roles:
                job.start(role)
            continue
        if faults.done() and "worker-0" in job.names and not job.ends and job.begins_again:
            network.note("somebody starts a worker again")
            job.kill("worker-0")
            job.start("worker-0")
        if faults.done() and all(job.tasks[r].done() for r in job.names if r.startswith("worker")):
            return
        if loop.time() > end_s:
            raise Violation(f"the job did not end: {job.committed} steps of {job.steps}")


def as_text(faults: int, error: Exception) -> str:
    """Return the result of `shortest` as text."""
    return "\n".join((f"with {faults} faults: {error!r}", *error.trace))  # type: ignore[attr-defined]
