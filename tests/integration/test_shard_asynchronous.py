"""Asynchronous replicas on a shard server over real gRPC: pushes at once, decisions in order, gathers any time."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from axon_ps.errors import GenerationChanged, Misuse
from axon_ps.sharding.policy import Asynchronous
from axon_ps.types import Array, Decision, Membership, Outcome, ReplicaClock
from axon_ps.wire.events import SnapshotOrder
from axon_ps.wire.v1 import common_pb2
from shard_fakes import TIMEOUT_S, Job, job, spec_of

SPEC = dataclasses.replace(spec_of(3000, 200), policy=Asynchronous())
RNG = np.random.default_rng(0)
FIRST, *GRADS = [[RNG.standard_normal(n).astype(np.float32) for n in (3000, 200)] for _ in range(3)]


def decided(j: Job, replica: int, clock: int, version: int, outcome: Outcome = Outcome.COMMIT) -> Decision:
    replica_clock = ReplicaClock(replica=replica, clock=clock, slowest_clock=0)
    return Decision(step=j.step, generation=j.generation, outcome=outcome, version=version, replica_clock=replica_clock)


async def push_all(j: Job, rank: int, clock: int) -> None:
    await asyncio.gather(*(j.push(rank, unit, GRADS[rank][unit], step=clock) for unit in (0, 1)))


def after(*ranks: int) -> list[Array]:
    """The units after SGD with lr 1 on the gradients of these, in this order."""
    values = [v.copy() for v in FIRST]
    for rank in ranks:
        values = [v - g for v, g in zip(values, GRADS[rank], strict=True)]
    return values


def saved(path: Path) -> Array:
    """What a server's file of a checkpoint holds: each unit, and behind it two words that count its updates."""
    data = path.read_bytes()
    return np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], np.float32)


def test_what_comes_while_a_step_is_applied_waits_for_its_turn(tmp_path: Path) -> None:
    async def run() -> None:
        async with job(SPEC, workers=2) as j:
            (shell,), (reports,) = j.shells, j.reports
            await j.upload(FIRST)
            await push_all(j, 1, 0)  # replica 1 waits for nobody
            assert [(g, s) for g, s, _ in reports.ready_for] == [(1, 0)]
            await push_all(j, 0, 0)
            assert len(reports.ready_for) == 2
            assert shell.engine.statistics()["accumulator_bytes"] == 2 * 4 * 3200

            pin = shell.model().pins.pin(0)  # as a snapshot of version 0 does: nothing is applied
            j.tell(decided(j, 1, 0, 1))
            j.step += 1
            j.tell(decided(j, 0, 0, 2))
            j.tell(SnapshotOrder(id=1, uri=str(tmp_path / "c"), version=2))
            next_push = asyncio.create_task(push_all(j, 1, 1))  # of a worker that knows of its decision
            newest = asyncio.create_task(j.gather(0, 0, min_version=2))
            _, whole = await j.gather(1, 0, min_version=0)
            np.testing.assert_array_equal(whole, FIRST[0])
            assert (shell.engine.version, newest.done(), next_push.done()) == (1, False, False)
            shell.model().pins.release(pin)
            _, whole = await newest
            np.testing.assert_array_equal(whole, after(1, 0)[0])
            await next_push
            assert [(g, s) for g, s, _ in reports.ready_for] == [(1, 0), (1, 0), (1, 1)]
            j.step += 1
            j.tell(decided(j, 1, 1, 3))
            _, files, error = await reports.snapshots.get()
            assert error is None
            values = saved(tmp_path / "c" / files[0].name)
            np.testing.assert_array_equal(values[:3000], after(1, 0)[0])
            np.testing.assert_array_equal(values[3002:3202], after(1, 0)[1])
            _, whole = await j.gather(0, 1, min_version=3)
            np.testing.assert_array_equal(whole, after(1, 0, 1)[1])

    asyncio.run(run())


def test_a_new_generation_that_comes_while_a_step_is_applied_comes_after_it() -> None:
    async def run() -> None:
        async with job(SPEC, workers=2) as j:
            (shell,) = j.shells
            await j.upload(FIRST)
            await push_all(j, 0, 0)
            await j.push(1, 0, GRADS[1][0], step=0)
            pin = shell.model().pins.pin(0)
            j.tell(decided(j, 0, 0, 1))
            abort = Decision(step=2, generation=1, outcome=Outcome.ABORT, version=1, next_generation=2)
            j.tell(abort)
            stale = asyncio.create_task(j.push(1, 1, GRADS[1][1], step=0))
            j.step, j.version = 2, 1
            members: Membership = dataclasses.replace(j.membership, generation=2, step=3)
            j.tell(members)
            assert shell.engine.generation == 1
            shell.model().pins.release(pin)
            j.generation = 2
            _, whole = await j.gather(0, 0, min_version=1)
            np.testing.assert_array_equal(whole, after(0)[0])
            with pytest.raises(GenerationChanged):
                await j.push(1, 1, GRADS[1][1], step=0, context=lambda: _of_generation(j, 1))
            await asyncio.gather(stale, return_exceptions=True)
            await push_all(j, 1, 0)  # clocks begin again
            assert j.reports[0].ready_for[-1][:2] == (2, 0)

    asyncio.run(run())


def _of_generation(j: Job, generation: int) -> common_pb2.CallContext:
    context = j.context(1)()
    context.generation = generation
    return context


def test_what_a_step_will_make_cannot_be_asked_where_others_may_come_between() -> None:
    async def run() -> None:
        async with job(SPEC, workers=2) as j:
            await j.upload(FIRST)
            out = np.empty(3000, np.float32)
            with pytest.raises(Misuse, match="replicas step asynchronously"):
                await j.groups[0].gather_speculative(
                    0, out, step=0, hyper=({"lr": 1.0},), context=j.context(0), timeout_s=TIMEOUT_S
                )

    asyncio.run(run())
