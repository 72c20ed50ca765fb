"""Hostile servers, which look like a coordinator or a shard server to a worker that connects to them.

A server of raw sockets does to its clients what `http2` does to servers. The client is the SDK's own: channels
and stubs, with deadlines. Every call has to end in time, with a result or an error of our tree.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Final

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from axon_ps.errors import AxonError
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.wire.v1 import common_pb2, coordinator_pb2, shard_pb2, status_pb2
from axon_ps_lab.fuzz.clocks import LoopClock, paced
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Findings, where

COORDINATOR: Final = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
SHARD: Final = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
TIMEOUT_S: Final = 0.5
GRACE_S: Final = 8.0
SETTLED_S: Final = 0.2


def _answers(entropy: Entropy) -> list[bytes | Frame]:
    """Return the messages of the server after its settings."""
    encoder = hpack.Encoder()
    head = encoder.encode([(":status", entropy.pick(("200", "200", "200", "404", "500", "0", "abc")))])
    typed = encoder.encode([(":status", "200"), ("content-type", entropy.pick(("application/grpc", "text/html", "")))])
    status = entropy.pick(("0", "13", "99", "-1", "x", ""))
    end = encoder.encode([("grpc-status", status), ("grpc-message", "%zz%ff"), ("axon-ps-error-bin", "!!!not base64")])
    data = entropy.data(entropy.pick((0, 1, 40)))
    length = entropy.pick((len(data), 0, 1 << 26, (1 << 32) - 1)).to_bytes(4, "big")
    pool: list[bytes | Frame] = [
        HeadersFrame(1, head, flags=["END_HEADERS"]),
        HeadersFrame(1, typed, flags=["END_HEADERS"]),
        HeadersFrame(1, typed, flags=["END_HEADERS"]),
        DataFrame(1, bytes((entropy.pick((0, 1, 9)),)) + length + data),
        DataFrame(1, b"\0\0\0\0\x03\xff\xff\xff"),
        HeadersFrame(1, end, flags=["END_HEADERS", "END_STREAM"]),
        HeadersFrame(1, encoder.encode([("x-large", "a" * 200_000)], huffman=False)[:16_000]),
        ContinuationFrame(1, b"\x82"),
        RstStreamFrame(1, error_code=entropy.pick((0, 1, 2, 7, 8, 11, 99))),
        RstStreamFrame(3, error_code=7),
        GoAwayFrame(0, last_stream_id=0, error_code=entropy.pick((0, 2, 11)), additional_data=b"too_many_pings"),
        PushPromiseFrame(1, promised_stream_id=2, data=typed, flags=["END_HEADERS"]),
        WindowUpdateFrame(0, window_increment=(1 << 31) - 1),
        SettingsFrame(0, settings={entropy.pick((3, 4, 5)): entropy.pick((0, 1, (1 << 32) - 1))}),
        b"".join([PingFrame(0, b"abcdefgh").serialize()] * 500),
        entropy.data(30),
    ]
    return [entropy.pick(pool) for _ in range(1 + entropy.below(6))]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, entropy: Entropy) -> None:
    how = entropy.below(10)
    try:
        if how == 0:  # hangs up
            return
        if how == 1:
            writer.write(entropy.pick((b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0-x\r\n", b"\x15\x03\x01\x00\x02\x02\x28")))
        elif how == 2:  # sends nothing
            await asyncio.sleep(TIMEOUT_S)
        else:
            writer.write(SettingsFrame(0).serialize())
            await reader.read(1 << 14)
            writer.write(SettingsFrame(0, flags=["ACK"]).serialize())
            if entropy.below(4):
                await asyncio.sleep(0.01)  # the client's first call is under way
            writer.write(b"".join(p.serialize() if isinstance(p, Frame) else p for p in _answers(entropy)))
            await writer.drain()
        if entropy.below(2):
            await asyncio.sleep(0.05)
    finally:
        writer.transport.abort()


class HostileServers:
    """See the module; its coroutines are for one event loop.

    Args:
        findings: gets the findings.
    """

    def __init__(self, findings: Findings) -> None:
        self.connections = 0
        self.ends: Counter[str] = Counter()
        self._findings = findings

    async def run(self, seed: str, count: int, seconds: float = 0.0) -> None:
        """Meet a server that answers each connection wrongly in another way, until there were `count` more.

        Args:
            seed: seed of its answers.
            count: number of connections.
            seconds: time over which they are spread; 0 = as fast as possible.
        """
        serving: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            with contextlib.suppress(OSError):
                await _serve(reader, writer, Entropy(f"{seed}/{self.connections}"))

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(serve(reader, writer))
            serving.add(task)
            task.add_done_callback(serving.discard)

        server = await asyncio.start_server(begin, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        before, clock = self.connections, LoopClock()
        async for number in paced(count, seconds):
            if self.connections - before > number:  # the previous meeting made several
                continue
            calls = [self._meet(address, Entropy(f"{seed}/calls/{number}/{i}"), clock) for i in range(4)]
            await asyncio.gather(*calls)
        clock.close()
        await asyncio.sleep(SETTLED_S)  # for gRPC's last connections
        server.close()
        if serving:
            await asyncio.wait(serving)

    async def _meet(self, address: str, entropy: Entropy, clock: LoopClock) -> None:
        channel = connect(address, Security())
        try:
            for _ in range(2):
                await self._call(Stub(channel, COORDINATOR), Stub(channel, SHARD), entropy, clock)
        finally:
            await channel.close()

    async def _call(self, coordinator: Stub, shard: Stub, entropy: Entropy, clock: LoopClock) -> None:
        began_s = clock.now_s
        try:
            if entropy.below(2):
                context = common_pb2.CallContext(job="j")
                await coordinator.call("Status", status_pb2.StatusRequest(context=context), timeout_s=TIMEOUT_S)
            else:
                async with shard.open("AllGather", timeout_s=TIMEOUT_S) as stream:
                    await stream.write(shard_pb2.AllGatherRequest())
                    async for _ in stream:
                        pass
            self.ends["result"] += 1
        except AxonError as error:
            self.ends[type(error).__name__] += 1
        except Exception as error:
            self._findings.add(f"hostile server: {where(error)}", [], repr(error))
        if clock.now_s - began_s > TIMEOUT_S + GRACE_S:
            self._findings.add("hang: a call of the SDK's to a hostile server", [])
