"""Transfers of all models share the lines: near ones go at once, those on long lines in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from axon_ps.shard.client.line import Permits, Rate
from axon_ps.shard.client.server_lines import CONNECTION_BYTES, IN_ORDER_BYTES, MAX_CONNECTIONS, ServerLines
from axon_ps.types import Member, Membership, Role


class Peers:
    """Servers that are all as far away."""

    longest_rtt_s = 0.1

    def rtt_s(self, server: int) -> float:
        return self.longest_rtt_s


class Steady(Rate):
    """A rate that is known."""

    def __init__(self, in_flight_bytes: int) -> None:
        super().__init__()
        self.known_bytes = in_flight_bytes

    def in_flight_bytes(self, rtt_s: float) -> int:
        return self.known_bytes if rtt_s else 0


def on(*nodes: str) -> Membership:
    """A worker and a server on each node."""
    both = {
        role: tuple(Member(role=role, rank=r, incarnation=f"{role}{r}", node=n, replica=r) for r, n in enumerate(nodes))
        for role in (Role.WORKER, Role.SHARD)
    }
    return Membership(
        generation=1,
        step=1,
        version=0,
        workers=both[Role.WORKER],
        shards=both[Role.SHARD],
        num_replicas=len(nodes),
        complete=True,
    )


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 10.0))  # type: ignore[arg-type]


async def is_granted(permit: object) -> bool:
    """True if a permit is granted at once, beside those that are held."""

    async def request() -> None:
        async with permit:  # type: ignore[attr-defined]
            pass

    requested = asyncio.ensure_future(request())
    for _ in range(3):
        await asyncio.sleep(0)
    granted = requested.done()
    requested.cancel()
    await asyncio.wait([requested])
    return granted


def test_gathers_of_a_long_line_wait_for_others_and_near_ones_do_not() -> None:
    async def body() -> None:
        peers = Peers()
        lines = ServerLines(peers, Steady(100))
        async with lines.gather(101) as permit:
            assert not await is_granted(lines.gather(1))
            permit.moved(1)
            assert await is_granted(lines.gather(1)), "the rest of the first does not fill the line"
            permit.moved(-1)
        async with lines.gather(101):
            peers.longest_rtt_s = 0.0
            assert await is_granted(lines.gather(1))

    run(body)


def test_a_push_waits_for_pushes_of_its_model_and_one_more_is_in_flight() -> None:
    async def body() -> None:
        lines, mine, other = ServerLines(Peers(), Steady(100)), Permits(), Permits()
        async with lines.push(mine, 130), lines.gather(1000):
            assert await is_granted(lines.push(mine, 30))
            assert not await is_granted(lines.push(mine, 29))
            assert await is_granted(lines.push(other, 29))

    run(body)


@pytest.mark.parametrize(("nodes", "in_order"), [(("a", "b"), True), (("a",), False), (("a", "b", "c"), False)])
def test_speculative_gathers_of_near_servers_go_in_order_on_two_hosts(nodes: tuple[str, ...], in_order: bool) -> None:
    async def body() -> None:
        peers = Peers()
        lines = ServerLines(peers, Steady(100))
        peers.longest_rtt_s = 0.0
        lines.set_members(on(*nodes))
        async with lines.speculative(IN_ORDER_BYTES + 1, 0):
            assert await is_granted(lines.speculative(1, 1)) == (not in_order)

    run(body)


@pytest.mark.parametrize(
    ("in_flight_bytes", "connections"),
    [(0, 1), (1, 2), (CONNECTION_BYTES, 2), (100 * CONNECTION_BYTES, MAX_CONNECTIONS)],
)
def test_a_long_line_takes_several_connections(in_flight_bytes: int, connections: int) -> None:
    lines = ServerLines(Peers(), Steady(in_flight_bytes))
    assert lines.in_flight_bytes == in_flight_bytes
    assert lines.connections(0) == connections
