"""Raw gRPC streams of bytes: the peer that the data plane is measured against.

As a program, a `grpc.aio` server with identity serializers, one process, that knows nothing of axon_ps:
`/raw/Pull` streams ready-made messages to the client, `/raw/Push` reads the client's messages and drops them,
`/raw/PushCopy` also copies each into a buffer, as every receiver that keeps what it got must. It prints its port.

With `--client HOST:PORT` it is a client of such a server: one channel, the same channel options as the data plane's.
For each line "pull", "pull copy", "push" or "push copy" that it reads it does that and prints the seconds it took. With
`--retain-message-memory` malloc retains freed messages, as our processes have it; nothing else knows of axon_ps. With
`--tls DIRECTORY` all of it is mutual TLS, by the one certificate `cert.pem` there, which both ends show and trust, and
its `key.pem`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.http2.lookahead_bytes", 16 << 20),
)


async def serve(total_bytes: int, chunk_bytes: int, host: str, tls: Path | None) -> None:
    """Serve until standard input ends."""
    frames = make_frames(total_bytes, chunk_bytes)
    buffer = np.zeros(total_bytes, np.uint8)

    async def pull(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame

    async def push(_request: Any, context: Any) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            pass
        return b""

    async def push_copy(_request: Any, context: Any) -> bytes:
        position = 0
        while (frame := await context.read()) is not grpc.aio.EOF:
            position = keep(frame, buffer, position)
        return b""

    handlers: dict[str, Any] = {
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
        "Push": grpc.stream_unary_rpc_method_handler(push),
        "PushCopy": grpc.stream_unary_rpc_method_handler(push_copy),
    }
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    if tls is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        key, cert = pem_files(tls)
        port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([(key, cert)], cert, True))
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


def pem_files(directory: Path) -> tuple[bytes, bytes]:
    """Key and certificate."""
    return (directory / "key.pem").read_bytes(), (directory / "cert.pem").read_bytes()


def make_frames(total_bytes: int, chunk_bytes: int) -> list[bytes]:
    """`total_bytes` in messages of `chunk_bytes`."""
    block = np.random.default_rng(0).bytes(chunk_bytes)
    return [bytes(bytearray(block)) for _ in range(total_bytes // chunk_bytes)]


def keep(frame: bytes, buffer: np.ndarray, position: int) -> int:
    """Copy a message into its place; returns where the next one goes."""
    buffer[position : position + len(frame)] = np.frombuffer(frame, np.uint8)
    return position + len(frame)


class RawClient:
    """One channel to a raw server. Call it on one event loop."""

    def __init__(self, address: str, tls: Path | None = None) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            key, cert = pem_files(tls)
            credentials = grpc.ssl_channel_credentials(cert, key, cert)
            self._channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        self._pull: Any = self._channel.unary_stream("/raw/Pull")
        self._push: dict[bool, Any] = {
            copy: self._channel.stream_unary("/raw/PushCopy" if copy else "/raw/Push") for copy in (False, True)
        }

    async def pull(self, buffer: np.ndarray | None) -> None:
        """Receive everything; into `buffer` when there is one."""
        position = 0
        call = self._pull(b"")
        while (frame := await call.read()) is not grpc.aio.EOF:
            if buffer is not None:
                position = keep(frame, buffer, position)

    async def push(self, frames: Sequence[bytes], *, copy: bool) -> None:
        """Send the messages; the receiver drops or keeps them."""
        call = self._push[copy]()
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
        await call

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


async def obey(address: str, total_bytes: int, chunk_bytes: int, tls: Path | None) -> None:
    """Do what standard input says until it ends."""
    client = RawClient(address, tls)
    frames, buffer = make_frames(total_bytes, chunk_bytes), np.zeros(total_bytes, np.uint8)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, *copy = line.split()
        begin_s = time.perf_counter()
        if what == "pull":
            await client.pull(buffer if copy else None)
        else:
            await client.push(frames, copy=bool(copy))
        print(time.perf_counter() - begin_s, flush=True)
    await client.close()


def main() -> None:
    """Be a server, or a client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-bytes", type=int, required=True)
    parser.add_argument("--chunk-bytes", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="where the server listens")
    parser.add_argument("--client", metavar="HOST:PORT")
    parser.add_argument("--tls", type=Path, metavar="DIRECTORY")
    parser.add_argument("--retain-message-memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.retain_message_memory:
        from axon_ps.host.malloc import retain_message_memory

        retain_message_memory()
    sizes = arguments.total_bytes, arguments.chunk_bytes
    if arguments.client is None:
        asyncio.run(serve(*sizes, arguments.host, arguments.tls))
    else:
        asyncio.run(obey(arguments.client, *sizes, arguments.tls))


if __name__ == "__main__":
    main()
