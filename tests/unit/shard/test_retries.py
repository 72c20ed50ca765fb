"""A call is attempted until it succeeds or may not be repeated. Tests of `shard/client/retries.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import (
    AxonError,
    Broken,
    Closed,
    GenerationChanged,
    InvalidRequest,
    SliceMoved,
    StepAborted,
    Timeout,
)
from axon_ps.rpc.deadlines import Deadline
from axon_ps.shard.client.retries import GATHERS, Retries
from axon_ps.shard.client.transfers import Transfer
from axon_ps.sharding.plan import Slice
from axon_ps.types import DType
from axon_ps.wire.v1.common_pb2 import CallContext
from axon_ps_lab.clock import ManualClock

SLICE = Slice(unit=0, server=0, begin=0, end=8)
MOVED, BROKE = SliceMoved("it has moved"), Broken("the connection broke")


class Servers:
    """The servers and their connections; time passes only while a call waits, at most a second at a time."""

    def __init__(self, *holders: int, timeout_s: float = 1000.0) -> None:
        self.clock = ManualClock()
        self.deadline = Deadline(timeout_s, self.clock)
        self.there = {0, 1}
        self.holders = list(holders) or [0]
        self.waited: list[float] = []
        self.waits_on: list[int] = []
        self.forgotten: list[int] = []
        peers: Any = self
        self.retries = Retries(peers, peers, self.holder)

    def holder(self, s: Slice, index: int) -> Slice:
        server = self.holders.pop(0) if len(self.holders) > 1 else self.holders[0]
        return Slice(unit=s.unit, server=server + index, begin=s.begin, end=s.end)

    def has(self, server: int) -> bool:
        return server in self.there

    async def wait(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)
        self.clock.advance(min(timeout_s, 1.0))

    async def stub(self, server: int, connection: int, deadline: Deadline) -> Any:
        return server, connection

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Any]:
        peers = self

        class Wait:
            def on(self, server: int) -> None:
                peers.waits_on.append(server)

        yield Wait()

    def forget(self, server: int) -> None:
        self.forgotten.append(server)

    def call(self, *outcomes: AxonError | str, **options: Any) -> tuple[str, list[tuple[int, Transfer]]]:
        """The result of a call whose attempts have these outcomes, and the server and transfer of each."""
        made: list[tuple[int, Transfer]] = []
        left = list(outcomes)

        async def attempt(stub: Any, s: Slice, transfer: Transfer) -> str:
            assert stub == (s.server, GATHERS)
            made.append((s.server, transfer))
            outcome = left.pop(0)
            if isinstance(outcome, AxonError):
                raise outcome
            return outcome

        transfer = Transfer(
            begin=0,
            end=8,
            array=np.zeros(8, np.float32),
            dtype=DType.F32,
            chunk_numel=8,
            context=CallContext,
            deadline=self.deadline,
        )
        do: Callable[..., Awaitable[str]] = attempt
        return asyncio.run(self.retries.call(do, GATHERS, SLICE, transfer, **options)), made


def test_a_call_that_succeeds_is_made_once() -> None:
    servers = Servers()
    result, made = servers.call("values", holder=1)
    assert (result, [server for server, _ in made], servers.retries.count) == ("values", [1], 0)
    assert (servers.waits_on, servers.waited) == ([1], [])


def test_each_attempt_goes_to_the_present_holder_after_a_longer_pause() -> None:
    servers = Servers(0, 0, 1)
    result, made = servers.call(MOVED, GenerationChanged("2 began", 2), *[MOVED] * 6, "values")
    assert result == "values"
    assert [server for server, _ in made] == [0, 0, *[1] * 7]
    assert servers.waited == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]
    assert servers.retries.count == 8
    assert not servers.forgotten
    assert not any(transfer.socket_only for _, transfer in made)


def test_shared_memory_is_not_used_again_after_a_failure() -> None:
    servers = Servers()
    _, made = servers.call(BROKE, Closed("another address"), "values")
    assert [(t.socket_only, t.resume) for _, t in made] == [(False, False), (True, False), (True, False)]
    assert servers.forgotten == [0, 0]


def test_a_push_is_resumed_and_is_lost_with_its_generation() -> None:
    servers = Servers()
    _, made = servers.call(BROKE, "pushed", repeatable=False)
    assert [(t.socket_only, t.resume) for _, t in made] == [(False, False), (True, True)]
    with pytest.raises(StepAborted, match="the step is lost: it has moved"):
        servers.call(MOVED, repeatable=False)
    with pytest.raises(GenerationChanged):
        servers.call(GenerationChanged("2 began", 2), repeatable=False)


def test_a_refusal_is_not_repeated() -> None:
    servers = Servers()
    with pytest.raises(InvalidRequest):
        servers.call(InvalidRequest("no such unit"))
    assert servers.retries.count == 0


def test_the_last_error_is_named_when_time_is_over() -> None:
    servers = Servers(timeout_s=0.05)
    with pytest.raises(Timeout, match=r"gave up after 0\.05 s; the last attempt failed: the connection broke"):
        servers.call(*[BROKE] * 9)
    assert servers.waited == [0.01, 0.02], "a pause of 0.04 s would pass the deadline"


def test_a_call_waits_for_a_lost_server_and_goes_to_another_holder() -> None:
    servers = Servers(0, 0, 1)
    servers.there = {1}
    result, made = servers.call("values")
    assert (result, [server for server, _ in made]) == ("values", [1])
    assert servers.waits_on == [1]
    assert servers.retries.count == 0
