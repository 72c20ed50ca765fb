"""A server takes calls of members once it knows what they know, and refuses those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.errors import Broken, Busy, GenerationChanged, InvalidRequest, Misuse, PermissionDenied
from axon_ps.shard.server.calls import fence as fence_module
from axon_ps.shard.server.calls.fence import Fence
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.v1.common_pb2 import CallContext

WORKER = Member(role=Role.WORKER, rank=0, incarnation="w", node="n", replica=0)
SERVER = Member(role=Role.SHARD, rank=0, incarnation="s", node="n")


class Model:
    """A model of which the fence sees the generation, the placement and the members."""

    def __init__(self, generation: int, placement: int = 0) -> None:
        placed = SimpleNamespace(number=placement)
        self.engine = SimpleNamespace(generation=generation, placement=placed, configured=True)
        self.members = {"w": WORKER}
        self.capacity = SimpleNamespace(missing="")
        self.order = SimpleNamespace(is_busy=False)
        self.subscriptions = object()

    def check_generation(self, generation: int) -> None:
        assert generation == self.engine.generation


def members(generation: int) -> Membership:
    return Membership(
        generation=generation, step=1, version=0, workers=(WORKER,), shards=(SERVER,), num_replicas=1, complete=True
    )


def call(incarnation: str = "w", **changes: Any) -> CallContext:
    return CallContext(**{"job": "j", "generation": 1, "incarnation": incarnation, **changes})


def run(body: Callable[[Fence, dict[int, Any]], Awaitable[None]]) -> None:
    async def main() -> None:
        models: dict[int, Any] = {0: Model(1)}
        fence = Fence("j", models)
        fence.set_members(members(1))
        await body(fence, models)

    asyncio.run(main())


def test_members_are_let_in_by_what_they_are() -> None:
    async def body(fence: Fence, models: dict[int, Any]) -> None:
        assert await fence.worker(call("w")) == (models[0], WORKER)
        assert await fence.server(call("s")) == (models[0], SERVER)
        assert await fence.member(call("w")) is WORKER
        assert await fence.member(call("s")) is SERVER
        for refused in (fence.worker(call("s")), fence.server(call("w")), fence.member(call("x"))):
            with pytest.raises(PermissionDenied, match="of generation 1"):
                await refused

    run(body)


@pytest.mark.parametrize("ahead", [{"generation": 2}, {"placement": 1}], ids=lambda ahead: next(iter(ahead)))
def test_a_caller_that_knows_more_waits_until_the_server_does(ahead: dict[str, int]) -> None:
    async def body(fence: Fence, models: dict[int, Any]) -> None:
        waiting = asyncio.ensure_future(fence.worker(call(**ahead)))
        await asyncio.sleep(0)
        fence.wake()
        await asyncio.sleep(0)
        assert not waiting.done()
        fence.set_members(members(ahead.get("generation", 1)))
        models[0] = Model(ahead.get("generation", 1), ahead.get("placement", 0))
        fence.wake()
        assert await waiting == (models[0], WORKER)

    run(body)


def test_news_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_module, "FENCE_S", 0.0)

    async def body(fence: Fence, models: dict[int, Any]) -> None:
        with pytest.raises(InvalidRequest, match=f"placement {1 << 40} is none of this job's; this server knows 0"):
            await fence.worker(call(placement=1 << 40))
        with pytest.raises(Broken, match="has not heard of generation 2 and placement 0 of model 0 within 0 s"):
            await fence.worker(call(generation=2))

    run(body)


def test_a_caller_of_the_past_is_told_the_present() -> None:
    async def body(fence: Fence, models: dict[int, Any]) -> None:
        fence.set_members(members(3))
        with pytest.raises(GenerationChanged, match="generation 1 is over; the current one is 3"):
            await fence.worker(call())

    run(body)


def test_a_model_that_is_not_here_is_refused() -> None:
    async def body(fence: Fence, models: dict[int, Any]) -> None:
        assert fence.observed(call("x")) == (models[0].subscriptions, models[0].engine)
        with pytest.raises(Busy, match="does not know model 1 yet"):
            fence.observed(call("x", model=1))
        models[0].capacity.missing = "there is no memory for it"
        with pytest.raises(Busy, match="there is no memory for it"):
            await fence.worker(call())
        fence.released[0] = "m"
        del models[0]
        for refused in (lambda: fence.observed(call()), lambda: asyncio.ensure_future(fence.worker(call()))):
            with pytest.raises(Misuse, match="model 'm' was released"):
                await refused()  # type: ignore[misc]

    run(body)


def test_calls_of_a_member_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_module, "MAX_MEMBER_CALLS", 1)

    async def body(fence: Fence, models: dict[int, Any]) -> None:
        with fence.calling("w"):
            with fence.calling("other"):
                pass
            with pytest.raises(Busy, match="'w' has 1 gathers and pushes under way"), fence.calling("w"):
                pass
        with fence.calling("w"):
            pass

    run(body)
