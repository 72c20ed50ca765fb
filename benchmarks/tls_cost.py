"""What mutual TLS costs: processor time per byte of the data plane, over plaintext, in turns on the same machine.

One worker (this process) and one shard server, by gRPC on loopback; the same once more with mutual TLS by the job's
own authority. Each round gathers and pushes one unit; processor time is that of both processes, in user mode and in the
kernel. A network card costs the kernel more per byte than loopback does, which makes the ratio smaller. Medians over
the rounds, and the median of each round's ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import _report
from axon_ps.rpc.security import Security
from axon_ps.sharding.plan import DEFAULT_CHUNK_NUMEL
from axon_ps.testing.cluster import LocalCluster
from axon_ps.types import DType, Role
from axon_ps.worker.environment import worker_config
from axon_ps.worker.world import World
from cluster import cpu_s
from data_plane import MIB, Ours

BOUND = 1.25
"""The most that mutual TLS may cost, of plaintext."""


@contextmanager
def measured(numel: int, dtype: DType, *, tls: bool) -> Iterator[Callable[[], dict[str, tuple[float, float]]]]:
    """A cluster and this process as its worker; a call gathers and pushes: by name, CPU seconds and seconds."""
    with LocalCluster(shards=1, world_size=1, security=Security(tls=tls)) as cluster:
        server = cluster.process(Role.SHARD, 0).pid
        worker = Ours(World.init(replace(worker_config(cluster.env(0)), direct_memory=False)), numel, dtype)

        def used(action: Callable[[], float]) -> tuple[float, float]:
            before_s = cpu_s(os.getpid()) + cpu_s(server)
            spent_s = action()
            return cpu_s(os.getpid()) + cpu_s(server) - before_s, spent_s

        try:
            yield lambda: {"AllGather": used(worker.gather), "ReduceScatter": used(worker.push)}
        finally:
            worker.world.close()


def rounds_of(options: argparse.Namespace, dtype: DType) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By "plaintext" and "mutual TLS", by call, what each round took."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {"plaintext": {}, "mutual TLS": {}}
    numel = options.mib * MIB // dtype.itemsize
    with ExitStack() as stack:
        ways = {way: stack.enter_context(measured(numel, dtype, tls=way == "mutual TLS")) for way in found}
        for number in range(-1, options.rounds):  # the first warms up
            for way, once in ways.items():
                for name, took in once().items():
                    if number >= 0:
                        found[way].setdefault(name, []).append(took)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 4 rounds")
    options = parser.parse_args()
    if options.quick:
        options.mib, options.rounds = 64, 4
    dtype = DType.parse(options.dtype)
    found, total_bytes = rounds_of(options, dtype), options.mib * MIB
    rows: list[dict[str, Any]] = []
    for name in found["plaintext"]:
        of_plain = [t[0] / p[0] for t, p in zip(found["mutual TLS"][name], found["plaintext"][name], strict=True)]
        for way, by_name in found.items():
            rows.append(
                {
                    "what": name,
                    "way": way,
                    "cpu_ns_per_byte": round(statistics.median(t[0] for t in by_name[name]) / total_bytes * 1e9, 3),
                    "gb_per_s": round(total_bytes / statistics.median(t[1] for t in by_name[name]) / 1e9, 2),
                    "cpu_of_plaintext": round(statistics.median(of_plain), 3) if way != "plaintext" else 1.0,
                }
            )
    columns = ("what", "way", "cpu_ns_per_byte", "gb_per_s", "cpu_of_plaintext")
    _report.table("What mutual TLS costs", columns, [[row[c] for c in columns] for row in rows])
    _report.write(
        "tls_cost", rows, mib=options.mib, rounds=options.rounds, chunk_numel=DEFAULT_CHUNK_NUMEL, bound=BOUND
    )


if __name__ == "__main__":
    main()
