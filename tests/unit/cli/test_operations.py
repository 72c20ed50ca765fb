"""`axon-ps drain` and the coordinator, which may let a server leave between any two calls."""

from __future__ import annotations

import asyncio
from typing import Self

import pytest

from axon_ps.cli import operations
from axon_ps.cli.settings import Settings
from axon_ps.errors import InvalidRequest
from axon_ps.observe.work import LongWork
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.events import Status

SERVERS = tuple(
    Member(role=Role.SHARD, rank=rank, address=f"127.0.0.1:{rank + 1}", node="a", incarnation=f"i{rank}")
    for rank in range(2)
)


class Leaving:
    """An operator of a job whose server 1 leaves after so many calls.

    Args:
        after: how many calls find it there.
    """

    def __init__(self, after: int) -> None:
        self._left = after

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def status(self) -> Status:
        there = SERVERS if self._is_there() else SERVERS[:1]
        membership = Membership(
            generation=1, step=1, version=1, workers=(), shards=there, num_replicas=1, complete=True
        )
        return Status(
            job="job",
            membership=membership,
            version=1,
            step=1,
            registered=True,
            initialized=True,
            parameters=10,
            lease_s=5.0,
            draining=(1,) if there is SERVERS else (),
        )

    async def drain(self, rank: int) -> int:
        if not self._is_there():
            raise InvalidRequest(f"the job has no shard server {rank}; it has 0")
        return 3

    def _is_there(self) -> bool:
        self._left -= 1
        return self._left >= 0


@pytest.mark.parametrize("after", range(2, 7))
def test_a_server_that_leaves_between_two_calls_has_left(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Leaving(after)
    monkeypatch.setattr(operations, "client", lambda settings: operator)
    monkeypatch.setattr(operations, "_ASK_S", 0.0)
    asyncio.run(operations.drained(Settings(), 1, 5.0, LongWork("drain")))


def test_a_server_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "client", lambda settings: Leaving(0))
    with pytest.raises(InvalidRequest, match="no shard server 1"):
        asyncio.run(operations.drained(Settings(), 1, 5.0, LongWork("drain")))
