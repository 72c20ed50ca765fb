"""Raw gRPC streams of bytes: the peer that the data plane is measured against.

The program is a `grpc.aio` server with identity serializers, one process, without axon_ps. `/raw/Pull` streams
ready-made messages to the client. `/raw/Push` reads the client's messages and drops them; `/raw/PushCopy` also copies
each into a buffer, as every receiver that retains its bytes must. The server prints its port.

With `--client HOST:PORT` the program is a client of such a server: one channel, with the data plane's channel options.
For each line "pull", "pull copy", "push" or "push copy" of its input it makes that transfer, and prints the seconds.
With `--retain-message-memory` malloc retains freed messages, as in axon_ps's processes; the rest is without axon_ps.
With `--tls DIRECTORY` everything is mutual TLS: both ends show and trust the certificate `cert.pem` there, with its key
`key.pem`.
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
    """Return the key and the certificate."""
    return (directory / "key.pem").read_bytes(), (directory / "cert.pem").read_bytes()


def make_frames(total_bytes: int, chunk_bytes: int) -> list[bytes]:
    """Return `total_bytes` in messages of `chunk_bytes`."""
    block = np.random.default_rng(0).bytes(chunk_bytes)
    return [bytes(bytearray(block)) for _ in range(total_bytes // chunk_bytes)]


def keep(frame: bytes, buffer: np.ndarray, position: int) -> int:
    """Copy a message to its destination; returns the position of the next one."""
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
        """Receive all messages; copy them into `buffer` if there is one."""
        position = 0
        call = self._pull(b"")
        while (frame := await call.read()) is not grpc.aio.EOF:
            if buffer is not None:
                position = keep(frame, buffer, position)

    async def push(self, frames: Sequence[bytes], *, copy: bool) -> None:
        """Send the messages; the receiver drops or copies them."""
        call = self._push[copy]()
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
        await call

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


async def obey(address: str, total_bytes: int, chunk_bytes: int, tls: Path | None) -> None:
    """Perform the requests of standard input until it ends."""
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
    """Run a server, or a client."""
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
