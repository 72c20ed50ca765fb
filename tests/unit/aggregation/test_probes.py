"""Probes ask shard servers that are waited for, and report those that do not answer, in virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from unittest import mock

import pytest

from axon_ps.aggregation.client.probes import Probes, Waits
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import Broken, Busy
from axon_ps.types import Member, Membership, Role
from axon_ps_lab.interleavings.virtual_loop import VirtualLoop

LEASE_S = 6.0
Run = Callable[[Callable[[], Awaitable[None]]], None]
ME = "f" * 32
IDS = [str(rank) * 32 for rank in range(3)]


def members(*incarnations: str) -> Membership:
    shards = tuple(
        Member(role=Role.SHARD, rank=rank, incarnation=incarnation, node="s", address=f"s:{rank + 1}")
        for rank, incarnation in enumerate(incarnations)
    )
    return Membership(generation=1, step=1, version=0, workers=(), shards=shards, num_replicas=1, complete=True)


class Asked:
    """Shard servers that answer as they are told to."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.silent: set[int] = set()
        self.failing: dict[int, Exception] = {}

    async def echo(self, rank: int) -> None:
        self.ranks.append(rank)
        if rank in self.silent:
            await asyncio.Event().wait()
        if rank in self.failing:
            raise self.failing[rank]


class Scene:
    def __init__(self, *, everybody: bool = False) -> None:
        self.report, self.waits, self.asked = ConnectivityReport(lambda: LEASE_S), Waits(), Asked()
        self.said: list[tuple[str, ...]] = []
        self.report.changed = lambda: self.said.append(tuple(sorted(self.report.take().unreachable)))
        self.probes = Probes(self.report, self.waits, self.asked.echo, ME, everybody=everybody)
        self.probes.set_members(members(*IDS))


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a test's coroutine in virtual time."""
    loop = VirtualLoop(random.Random(0))

    def run(test: Callable[[], Awaitable[None]]) -> None:
        with mock.patch.object(time, "monotonic", loop.time):
            loop.run_until_complete(test())

    yield run
    loop.close()


def test_nobody_is_asked_whom_nothing_waits_for(run: Run) -> None:
    async def test() -> None:
        scene = Scene()
        for _ in range(20):
            with scene.waits.begin() as wait:
                wait.on(1)
                await asyncio.sleep(0.1 * LEASE_S)
        assert scene.asked.ranks == [], "no call has lasted long"
        await scene.probes.close()

    run(test)


def test_a_server_that_answers_is_asked_now_and_then(run: Run) -> None:
    async def test() -> None:
        scene = Scene()
        with scene.waits.begin() as wait:
            wait.on(1)
            await asyncio.sleep(10 * LEASE_S)
        assert set(scene.asked.ranks) == {1}
        assert 10 <= len(scene.asked.ranks) <= 30
        assert not any(scene.said)
        await scene.probes.close()

    run(test)


def test_one_that_does_not_answer_is_reported_until_it_does(
    run: Run,
) -> None:
    async def test() -> None:
        scene = Scene()
        scene.asked.silent = {1}
        with scene.waits.begin() as wait:
            wait.on(1)
            await asyncio.sleep(LEASE_S)
        assert scene.said == [(IDS[1],)]
        scene.asked.silent = set()
        await asyncio.sleep(2 * LEASE_S)
        assert scene.said == [(IDS[1],), ()], "though nothing waits any more"
        await scene.probes.close()

    run(test)


def test_a_call_that_fails_and_is_made_again_has_waited_all_the_time(
    run: Run,
) -> None:
    async def test() -> None:
        scene = Scene()
        scene.asked.failing = {2: Broken("a firewall rejects it")}
        with scene.waits.begin() as wait:
            for _ in range(20):
                wait.on(2)
                await asyncio.sleep(0.05 * LEASE_S)
        assert scene.said == [(IDS[2],)]
        await scene.probes.close()

    run(test)


def test_a_refusal_is_an_answer(run: Run) -> None:
    async def test() -> None:
        scene = Scene()
        scene.asked.failing = {0: Busy("later")}
        with scene.waits.begin() as wait:
            wait.on(0)
            await asyncio.sleep(2 * LEASE_S)
        assert not any(scene.said)
        await scene.probes.close()

    run(test)


def test_everybody_is_asked_once_when_it_comes(run: Run) -> None:
    async def test() -> None:
        scene = Scene(everybody=True)
        await asyncio.sleep(LEASE_S)
        assert sorted(scene.asked.ranks) == [0, 1, 2]
        assert scene.report.begin().reached == frozenset(IDS)
        scene.probes.set_members(members(IDS[0], ME, "a" * 32))
        await asyncio.sleep(LEASE_S)
        assert sorted(scene.asked.ranks) == [0, 1, 2, 2], "the new one, and not ourselves"
        assert scene.report.begin().reached == {IDS[0], "a" * 32}
        await scene.probes.close()

    run(test)


def test_one_that_is_no_member_any_more_is_forgotten(run: Run) -> None:
    async def test() -> None:
        scene = Scene(everybody=True)
        scene.asked.silent = {1}
        scene.probes.set_members(members(IDS[0], "b" * 32, IDS[2]))
        await asyncio.sleep(LEASE_S)
        assert scene.report.begin().unreachable == {"b" * 32}
        scene.probes.set_members(members(IDS[0]))
        assert scene.report.begin().unreachable == frozenset()
        await scene.probes.close()

    run(test)


def test_one_that_comes_back_is_named_again(run: Run) -> None:
    async def test() -> None:
        scene = Scene(everybody=True)
        await asyncio.sleep(LEASE_S)
        named: list[str] = []
        scene.report.changed = lambda: named.extend(scene.report.take().reached)
        scene.probes.set_members(members(IDS[0]))
        scene.probes.set_members(members(*IDS))
        await asyncio.sleep(LEASE_S)
        assert sorted(named) == IDS[1:], "the coordinator has forgotten them, too"
        await scene.probes.close()

    run(test)


def test_a_stream_hears_once_who_was_reached(run: Run) -> None:
    async def test() -> None:
        scene = Scene(everybody=True)
        await asyncio.sleep(LEASE_S)
        assert scene.report.take().reached == frozenset(), "said as it was found"
        assert scene.report.begin().reached == frozenset(IDS), "a new stream has heard nothing"
        assert scene.report.take().reached == frozenset()
        await scene.probes.close()

    run(test)
