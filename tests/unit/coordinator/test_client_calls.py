"""Which answers to a member's call are tried again, and which it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from axon_ps.coordinator.client.calls import Calls
from axon_ps.errors import AxonError, Closed, MemberLost
from axon_ps.rpc.deadlines import Deadline
from axon_ps.wire.v1 import common_pb2, coordinator_pb2

LOST = MemberLost("shard server 1 is not there to say whether it can hold it")
REPLACED = Closed("the connection was closed before Register was done")


class Scripted(Calls):
    """Its coordinator answers with these errors, one after the other, and then well."""

    def __init__(self, *errors: AxonError, over: bool = False) -> None:
        self.errors = list(errors)
        self.over = over

    @property
    def _is_over(self) -> bool:
        return self.over

    def context(self) -> common_pb2.CallContext:
        return common_pb2.CallContext()

    async def _connected(self, deadline: Deadline) -> Any:
        return self

    async def _reached(self, generation: int, deadline: Deadline) -> None:
        pass

    async def call(self, method: str, request: object, *, timeout_s: float) -> object:
        if self.errors:
            raise self.errors.pop(0)
        return coordinator_pb2.RegisterReply(generation=7) if method == "Register" else coordinator_pb2.KVReply()


@pytest.mark.parametrize("error", [LOST, REPLACED], ids=["a server is missing", "another connection"])
def test_a_registration_is_tried_again(error: AxonError) -> None:
    assert asyncio.run(Scripted(error).register(timeout_s=10.0)).generation == 7


def test_a_registration_waits_for_a_server_no_longer_than_it_may() -> None:
    with pytest.raises(MemberLost, match="shard server 1"):
        asyncio.run(Scripted(*[LOST] * 50).register(timeout_s=0.05))


def test_a_connection_that_was_closed_for_good_is_said_to_be() -> None:
    with pytest.raises(Closed):
        asyncio.run(Scripted(REPLACED, over=True).register(timeout_s=10.0))


def test_a_member_that_another_call_lost_is_its_answer() -> None:
    with pytest.raises(MemberLost):
        asyncio.run(Scripted(LOST).kv_get("a", timeout_s=10.0))
