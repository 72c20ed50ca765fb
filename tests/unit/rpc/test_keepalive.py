"""Who waits for a peer that has disappeared behind a connection that nothing breaks is not left waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from axon_ps.errors import Broken
from axon_ps.rpc import channels, server
from axon_ps.rpc.channels import connect, split_address
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import shard_pb2
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.proxy import Disturbance, Proxies
from rpc_fakes import SHARD, run, serving

INTERVALS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


def sooner(options: tuple[channels.Option, ...]) -> tuple[channels.Option, ...]:
    """The same with pings after 200 ms instead of seconds."""
    assert all(0 < int(dict(options)[name]) <= 10_000 for name in INTERVALS)
    return tuple((name, 200 if name in INTERVALS else value) for name, value in options)


@pytest.mark.parametrize("end", ["server", "client"])
def test_a_peer_behind_a_black_hole_ends_what_waits_for_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end in question pings soon, so that it finds out by itself."""
    if end == "server":
        monkeypatch.setattr(server, "SERVER_OPTIONS", sooner(channels.SERVER_OPTIONS))
    else:
        monkeypatch.setattr(channels, "CLIENT_OPTIONS", sooner(channels.CLIENT_OPTIONS))

    async def main() -> None:
        waiting, cancelled = asyncio.Event(), asyncio.Event()

        async def all_gather(context: Any) -> None:
            await context.read()
            waiting.set()
            try:
                await asyncio.get_running_loop().create_future()  # as a gather of a version that never comes
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with serving(all_gather=all_gather) as served:
            with Proxies() as proxies:
                proxy = proxies.open(split_address(served.address))
                channel = connect(proxy.address, Security())
                stream = Stub(channel, SHARD).open("AllGather")
                await stream.write(shard_pb2.AllGatherRequest())
                await waiting.wait()
                proxy.disturb(Disturbance(kind=Fault.BLACK_HOLE, seconds=60.0))
                if end == "server":
                    await cancelled.wait()
                else:
                    with pytest.raises(Broken):
                        await stream.read()
                await channel.close()
        await cancelled.wait()

    run(main())
