"""The memory that hostile connections leave in a coordinator, compared with that in a bare gRPC server.

    python -m axon_ps_lab.fuzz.bare_growth [--connections 12000]

The program attacks a coordinator and a `grpc.aio` server with two handlers that do nothing, one after the other, with
the same connections. It prints the resident memory of each after every twelfth of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
from typing import Any, Final

import grpc
import grpc.aio

from axon_ps.testing import LocalCluster
from axon_ps.testing.processes import COORDINATOR
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.hostile.http2 import ATTACKS, connected

AT_A_TIME: Final = 48
LOOKS: Final = 12
REST_S: Final = 1.5
STREAMS: Final = ("Session", "Watch", "AllGather", "Info")
_ARENA_MAX: Final = -8  # malloc.h


class Nothing(grpc.GenericRpcHandler):
    """Reads all messages, and answers with empty ones."""

    def service(self, call: Any) -> Any:
        """See `grpc.GenericRpcHandler`."""
        if call.method.endswith(STREAMS):
            return grpc.stream_stream_rpc_method_handler(_answered)
        return grpc.unary_unary_rpc_method_handler(_answer)


async def _answer(request: bytes, context: Any) -> bytes:
    return b""


async def _answered(requests: Any, context: Any) -> Any:
    async for _ in requests:
        yield b""


async def serve() -> None:
    """Run the bare server, with as many arenas as our services have."""
    ctypes.CDLL(None).mallopt(_ARENA_MAX, max(2, os.cpu_count() or 1))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Nothing(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def attack(port: int, token: str, pid: int, connections: int) -> list[float]:
    """Return the resident memory before, and after each part of the connections."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        entropy = Entropy(f"growth {number}")
        async with limit:
            with contextlib.suppress(OSError, TimeoutError):
                async with connected(port, token if entropy.below(2) else "") as connection:
                    await entropy.pick(ATTACKS)(connection, entropy)

    found, each = [resident_mib(pid)], connections // LOOKS
    for look in range(LOOKS):
        await asyncio.gather(*(one(look * each + number) for number in range(each)))
        await asyncio.sleep(REST_S)
        found.append(resident_mib(pid))
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=12_000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    grown = {}
    with LocalCluster(shards=1, world_size=1) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        pid = cluster.process(COORDINATOR).pid
        grown["the coordinator"] = asyncio.run(attack(port, cluster.token, pid, options.connections))
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as bare:
        assert bare.stdout is not None
        port = int(bare.stdout.readline())
        try:
            grown["a bare grpc.aio server"] = asyncio.run(attack(port, "token", bare.pid, options.connections))
        finally:
            bare.terminate()
    for name, mib in grown.items():
        print(f"{name}: {', '.join(f'{each:.0f}' for each in mib)} MiB; after a twelfth = 1: {mib[-1] / mib[1]:.2f}")


if __name__ == "__main__":
    main()
