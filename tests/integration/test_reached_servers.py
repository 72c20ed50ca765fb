"""Shard servers send back what they are sent, and a worker that waits for one learns whether it can be reached."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.aggregation.client import probes
from axon_ps.aggregation.client.probes import ECHO_BYTES
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import AxonError, InvalidRequest, PermissionDenied
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.shard.server.servicer import ShardServicer
from axon_ps.wire.events import Connectivity
from axon_ps.wire.v1 import common_pb2, shard_pb2
from deadlines import HANG_S
from shard_fakes import Job, job, spec_of

SPEC = spec_of(64)
LEASE_S = 0.6


def test_a_server_sends_back_what_it_is_sent() -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            stream = j.raw().open("Echo", timeout_s=HANG_S)
            for payload in (b"", b"some", bytes(range(256)) * (ECHO_BYTES // 256)):
                await stream.write(shard_pb2.EchoMessage(context=j.context()(), payload=payload))
                assert (await stream.read()).payload == payload
            stream.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("job_name", "count", "error", "words"),
    [
        ("j", ECHO_BYTES + 1, InvalidRequest, "65537 bytes are to be sent back; at most 65536 are"),
        ("another", 1, PermissionDenied, "this server serves job 'j', not 'another'"),
    ],
)
def test_it_refuses_more_and_others(job_name: str, count: int, error: type[AxonError], words: str) -> None:
    async def scenario() -> None:
        async with job(SPEC) as j:
            stream = j.raw().open("Echo", timeout_s=HANG_S)
            context = common_pb2.CallContext(job=job_name)
            await stream.write(shard_pb2.EchoMessage(context=context, payload=bytes(count)))
            with pytest.raises(error, match=words):
                await stream.read()

    asyncio.run(scenario())


class Said:
    """A worker that waits for a server, and its findings."""

    def __init__(self, j: Job) -> None:
        self.report = ConnectivityReport(lambda: LEASE_S)
        self._news: asyncio.Queue[Connectivity] = asyncio.Queue()
        self.report.changed = lambda: self._news.put_nowait(self.report.take())
        j.groups[0].probe(self.report, j.context())
        j.groups[0].set_members(j.membership)

    async def next(self) -> Connectivity:
        return await asyncio.wait_for(self._news.get(), HANG_S)


def test_a_worker_that_waits_for_a_server_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LEAST_S", HANG_S)
    through, echo = asyncio.Event(), ShardServicer.echo
    through.set()

    async def echoed(servicer: ShardServicer, context: ServerCall) -> None:
        """As over a path that carries small packets alone: the call begins, and nothing of it comes back."""
        await asyncio.wait_for(through.wait(), HANG_S)
        await echo(servicer, context)

    monkeypatch.setattr(ShardServicer, "echo", echoed)

    async def scenario() -> None:
        async with job(SPEC) as j:
            said, server = Said(j), j.membership.shards[0].incarnation
            waiting = asyncio.create_task(j.gather(0, 0, min_version=1))
            assert await said.next() == Connectivity(reached=frozenset({server})), "it is slow, and answers"
            monkeypatch.setattr(probes, "LEAST_S", 0.1)
            through.clear()
            while server not in (await said.next()).unreachable:
                pass
            through.set()
            while (await said.next()).unreachable:
                pass
            waiting.cancel()
            await asyncio.wait([waiting], timeout=HANG_S)

    asyncio.run(scenario())
