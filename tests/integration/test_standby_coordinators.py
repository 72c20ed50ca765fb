"""Two coordinators of one job over real gRPC on loopback: one leads, the other stands by, and clients find which.

Their store is a stand-in for etcd, in this process, so that who leads is the test's to say. The same with etcd and with
real processes is in tests/faults/test_coordinator_failover.py.

Tests of `coordinator/client/addresses.py` and `coordinator/client/succession.py`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from axon_ps.coordinator.client import addresses as addresses_module
from axon_ps.coordinator.client import heartbeat, succession
from axon_ps.coordinator.client.addresses import Addresses, Endpoint
from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.client.session import OperatorClient, SessionLost, SessionRestored
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server.server import serve
from axon_ps.errors import Broken, NotLeader, Unreachable
from axon_ps.rpc.health import health_of
from axon_ps.rpc.security import Security
from axon_ps.storage.state_store import Record, SharedStateStore
from axon_ps.types import Decision, Outcome, Role
from axon_ps.wire.events import Vote
from coordinator_harness import OPTIMIZER, SOON_S, SPEC, Member, ready


@dataclass
class Election:
    """What the stores of one job have in common."""

    records: dict[str, bytes] = field(default_factory=dict)
    stores: list[ElectedStore] = field(default_factory=list)
    leader: ElectedStore | None = None


class ElectedStore(SharedStateStore):
    """Records in memory, of several coordinators; `election.leader` says who leads."""

    blocks = False

    def __init__(self, election: Election) -> None:
        self.election = election
        self.believes = False
        self.may_lead = True
        self.was_asked = False
        election.stores.append(self)

    def campaign(self) -> str:
        if self.election.leader is None and self.may_lead:
            self.election.leader = self
        self.believes = self.election.leader is self
        return "" if self.believes else self.election.leader.address if self.election.leader else "nobody"

    def leads(self) -> bool:
        return self.believes

    def resign(self) -> None:
        self.believes = False
        if self.election.leader is self:
            self.election.leader = None

    def refused(self) -> None:
        self.was_asked = True

    def has_standby(self, *, asked: bool = False) -> bool:
        return any(s is not self and s.may_lead and (s.was_asked or not asked) for s in self.election.stores)

    def load(self) -> Mapping[str, bytes]:
        return dict(self.election.records)

    def apply(self, records: Sequence[Record]) -> None:
        if self.election.leader is not self:
            self.believes = False
            raise NotLeader("fenced")
        for record in records:
            if record.value is None:
                self.election.records.pop(record.key, None)
            else:
                self.election.records[record.key] = record.value

    def close(self) -> None:
        self.resign()


class Pair:
    """Two coordinators; the first one leads at first."""

    def __init__(self, **config: Any) -> None:
        self.config = CoordinatorConfig(**{"job": "job", "world_size": 1, "num_shards": 1, **config})
        self.election = Election()
        self.stops = [asyncio.Event(), asyncio.Event()]
        self.ports = [0, 0]
        self.tasks: list[asyncio.Task[None]] = []
        self.clients: list[Member | OperatorClient] = []

    async def start(self, hosts: Sequence[str] = ("127.0.0.1", "127.0.0.1"), *, same_port: bool = False) -> None:
        for i, host in enumerate(hosts):
            ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            store, port = ElectedStore(self.election), self.ports[0] if same_port else 0
            served = serve(self.config, host, port, Security(), store, ready.set_result, self.stops[i])
            self.tasks.append(asyncio.create_task(served))
            self.ports[i] = await asyncio.wait_for(ready, SOON_S)
            if i == 0:
                await until(lambda: self.election.leader is not None)

    @property
    def stores(self) -> list[ElectedStore]:
        return self.election.stores

    def address(self, *which: int) -> str:
        return ",".join(f"127.0.0.1:{self.ports[i]}" for i in which)

    def member(self, address: str, role: Role, **options: Any) -> Member:
        self.clients.append(member := Member(address, role, **options))
        return member

    def operator(self, address: str) -> OperatorClient:
        self.clients.append(operator := OperatorClient(address, security=Security()))
        return operator

    async def job(self, address: str) -> tuple[Member, Member]:
        """A worker and a shard server that may make steps."""
        shard, worker = self.member(address, Role.SHARD), self.member(address, Role.WORKER)
        await shard.start(SOON_S)
        await worker.start(SOON_S)
        await worker.register(SPEC, OPTIMIZER)
        shard.initialized(version=0, epoch=0)
        for member in (worker, shard):
            await member.until_initialized()
        return worker, shard

    async def stop(self, i: int) -> None:
        self.stops[i].set()
        await self.tasks[i]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for i in range(len(self.tasks)):
            await self.stop(i)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():
            await asyncio.sleep(0.01)


async def step(worker: Member, shard: Member, number: int) -> Decision:
    """One step of a job; after a failover its first messages may be of a generation that is over."""
    seen = len(worker.received(Decision))
    generation = (await worker.until_complete()).generation
    shard.ready(ready(shard, generation, number, 1.0))
    worker.vote(Vote(generation=generation, step=number, hyper=({"lr": 0.1},)))
    return await worker.wait_for(Decision, after=seen)


@asynccontextmanager
async def pair(**config: Any) -> AsyncIterator[Pair]:
    p = Pair(**config)
    try:
        await p.start()
        yield p
    finally:
        await p.close()


def run(test: Callable[[Pair], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        async with pair(**config) as p:
            await test(p)

    asyncio.run(main())


async def service_health(address: str, service: str = SERVICE.full_name) -> str:
    return await health_of(address, Security(), service=service, timeout_s=SOON_S)


def test_a_standby_refuses_says_who_leads_and_is_healthy_but_does_not_serve() -> None:
    async def test(p: Pair) -> None:
        await until(lambda: p.stores[1].address != "")
        assert [await service_health(p.address(i)) for i in (0, 1)] == ["SERVING", "NOT_SERVING"]
        assert [await service_health(p.address(i), "") for i in (0, 1)] == ["SERVING", "SERVING"]
        with pytest.raises(NotLeader, match=rf"stands by: the coordinator at {p.address(0)} leads"):
            await p.operator(p.address(1)).status()
        for both in (p.address(0, 1), p.address(1, 0)):
            assert (await p.operator(both).status()).job == "job"
        with pytest.raises(Unreachable):
            await p.operator("127.0.0.1:1,127.0.0.1:2").status()
        assert (await p.operator(f"127.0.0.1:1,{p.address(0)}").status()).job == "job"

    run(test)


def test_members_find_the_leader_and_follow_it_when_it_stops() -> None:
    async def test(p: Pair) -> None:
        worker, shard = await p.job(p.address(1, 0))
        assert (await step(worker, shard, 1)).outcome is Outcome.COMMIT
        await worker.kv_put("k", b"v")
        began_s = time.monotonic()
        await p.stop(0)
        await worker.wait_for(SessionRestored)
        await shard.wait_for(SessionRestored)
        assert time.monotonic() - began_s < 5.0
        assert (await step(worker, shard, 2)).version == 2
        assert await worker.kv_get("k") == b"v"
        assert await service_health(p.address(1)) == "SERVING"

    run(test)


def test_a_leader_that_is_none_any_more_writes_and_announces_nothing_and_stands_by() -> None:
    async def test(p: Pair) -> None:
        worker, shard = await p.job(p.address(0, 1))
        await step(worker, shard, 1)
        before = dict(p.election.records)
        p.election.leader = None
        p.stores[0].may_lead = False
        p.stores[1].campaign()  # before the old one notices
        generation = worker.context().generation
        shard.ready(ready(shard, generation, 2, 1.0))
        worker.vote(Vote(generation=generation, step=2, hyper=({"lr": 0.1},)))
        decision = await worker.wait_for(Decision, after=1)  # the messages are sent again to the next leader
        assert (decision.step, decision.outcome) == (2, Outcome.COMMIT)
        assert [k for k, v in before.items() if p.election.records[k] != v] == ["progress"]
        assert (await step(worker, shard, 3)).version == 3
        with pytest.raises(NotLeader, match=r"leads no more|the coordinator at .* leads"):
            await p.operator(p.address(0)).kv_put("k", b"v")

    run(test)


def test_a_leader_that_finds_its_lease_over_sends_its_members_away() -> None:
    async def test(p: Pair) -> None:
        worker, shard = await p.job(p.address(0, 1))
        p.stores[0].may_lead = False
        p.stores[0].resign()  # as when its lease was not renewed in time: nothing is written that would show it
        await worker.wait_for(SessionRestored)
        await shard.wait_for(SessionRestored)
        assert p.election.leader is p.stores[1]
        assert (await step(worker, shard, 1)).version == 1

    run(test)


def test_calls_that_wait_at_a_leader_are_made_again_at_the_next() -> None:
    async def test(p: Pair) -> None:
        worker, _ = await p.job(p.address(0, 1))
        waiting = asyncio.ensure_future(worker.kv_wait("k", timeout_s=SOON_S))
        await worker.kv_put("other", b"v")
        await p.stop(0)
        await worker.wait_for(SessionRestored)
        assert await worker.kv_add("n", 2) == 2
        await worker.kv_put("k", b"v")
        assert await waiting == b"v"

    run(test)


def test_members_that_go_silent_together_are_not_declared_lost_but_left_to_the_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(p: Pair) -> None:
        worker, shard = await p.job(p.address(0, 1))
        await until(lambda: p.stores[1].address != "")
        generation = worker.context().generation
        monkeypatch.setattr(heartbeat, "MEASURE_S", 1000.0)
        for member in (worker, shard):
            member.lease_s = 3000.0  # sends no heartbeats
        assert p.election.leader is p.stores[0]
        await until(lambda: p.election.leader is p.stores[1])
        for member in (worker, shard):
            await member.wait_for(SessionRestored)
        assert worker.context().generation == generation
        assert (await step(worker, shard, 1)).version == 1

    run(test, lease_s=0.5)


def test_a_leader_without_members_lets_a_standby_lead_that_they_have_asked() -> None:
    async def test(p: Pair) -> None:
        worker = p.member(p.address(1), Role.WORKER)
        await worker.start(SOON_S)
        assert p.election.leader is p.stores[1]

    run(test, lease_s=0.3)


def test_a_name_of_several_addresses_is_several_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    getaddrinfo = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "coordinators.test":
            return getaddrinfo(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port)) for number in ("127.0.0.2", "127.0.0.1")]

    async def main() -> None:
        p = Pair()
        try:
            await p.start(("127.0.0.1", "127.0.0.2"), same_port=True)
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            worker, shard = await p.job(f"coordinators.test:{p.ports[0]}")
            await p.stop(0)
            assert (await step(worker, shard, 1)).version == 1
            assert (await p.operator(f"coordinators.test:{p.ports[0]}").status()).version == 1
        finally:
            await p.close()

    asyncio.run(main())


def test_an_address_where_nobody_answers_costs_a_second_a_round() -> None:
    async def test(p: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            worker = p.member(f"127.0.0.1:{silent.getsockname()[1]},{p.address(0)}", Role.WORKER)
            began_s = time.monotonic()
            await worker.start(SOON_S)
            assert 0.9 < time.monotonic() - began_s < 8.0  # a handshake alone may take 20 s

    run(test)


def test_one_coordinator_by_two_names_is_not_taken_for_its_successor() -> None:
    async def test(p: Pair) -> None:
        worker = p.member(f"127.0.0.1:{p.ports[0]},localhost:{p.ports[0]}", Role.WORKER)
        await worker.start(SOON_S)
        asked = succession.successor(worker._stream.addresses, Security(), "job")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 2.5 * succession.ASK_S)
        assert worker.received(SessionLost) == []

    run(test)


# ---------------------------------------------------------------------- the addresses


def test_addresses_are_tried_in_turn_and_looked_up_after_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], ["10.0.0.9"]]

    async def resolve(address: str) -> list[Endpoint]:
        if address != "many:7":
            return [Endpoint(address)]
        return [Endpoint(f"{number}:7", "many") for number in found.pop(0)]

    async def main() -> None:
        monkeypatch.setattr(addresses_module, "_look_up", resolve)
        a = Addresses("many:7, one:7")
        await a.look_up()
        seen = [a.present.address]
        rounds = []
        for _ in range(6):
            rounds.append(await a.next())
            seen.append(a.present.address)
        assert seen == ["10.0.0.1:7", "10.0.0.2:7", "one:7", "10.0.0.2:7", "10.0.0.3:7", "one:7", "10.0.0.9:7"]
        assert rounds == [True, True, False, True, True, False]
        await a.next()
        a.found()
        assert await a.next(), "the other one is tried at once"

    asyncio.run(main())


def test_broken_is_what_a_member_gets_when_nobody_leads_in_time() -> None:
    async def test(p: Pair) -> None:
        for store in p.stores:
            store.may_lead = False
        p.stores[0].resign()
        await until(lambda: p.tasks[0].done() or not p.stores[0].believes)
        with pytest.raises(Broken):
            await p.member(p.address(0, 1), Role.WORKER).start(1.0)

    run(test)
