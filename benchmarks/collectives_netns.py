"""Collectives across hosts: the gRPC backend against gloo, on four worker hosts with 500 Mbit/s cards.

The operations are all-reduce, all-gather and reduce-scatter of 64 MiB f32: the size of the larger buffer, which is an
all-gather's output or a reduce-scatter's input. There are two places: four dedicated server hosts, and shard servers on
the workers' own hosts. gloo runs in the same network; the sides alternate.

- A round's time is that of its slowest rank, from the moment at which all begin.
- CPU seconds are those of all processes of a side, workers and servers, per GB of payload into and out of workers.
- Bytes are those of the mean card, beside those of the theory.

The lower bound of CPU time is that of raw gRPC on loopback: one process pushes bytes, and another copies them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.host.ports import free_ports
from axon_ps_lab import report
from cluster import axon_cluster, cpu_s
from collective_worker import OPERATIONS
from netns import CONGESTION, Network, NetworkUnavailable
from raw_stream import RawClient, make_frames
from whole_step import MIB, Sample, Team, expect, go_on, server_hosts

HERE = Path(__file__).parent
WORKERS = 4
HOSTS = list(Team.of(WORKERS).hosts)
RUN_TIMEOUT_S = 120.0
COLUMNS = (
    *("servers", "operation", "side", "median_s", "slowest_s", "ratio", "target", "cpu_s_per_gb", "gb_per_cpu_s"),
    *("worker_rx_mib", "worker_tx_mib", "worker_theory", "server_rx_mib", "server_tx_mib", "server_theory"),
)
TARGETS = {"dedicated": {"all_reduce": 0.72, "all_gather": 1.1, "reduce_scatter": 0.68}}


def theory(operation: str, side: str, servers: str, mib: float) -> tuple[str, str]:
    """Return the least MiB that each worker's and each server's card must receive/send, by this algorithm."""
    n = WORKERS
    ring = mib * (n - 1) / n
    if side == "gloo":
        once = {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring}[operation]
        return f"{once:.0f}/{once:.0f}", ""
    up = {"all_reduce": mib, "all_gather": mib / n, "reduce_scatter": mib}[operation]  # from each worker
    down = {"all_reduce": mib, "all_gather": ring, "reduce_scatter": mib / n}[operation]
    if servers == "dedicated":
        return f"{down:.0f}/{up:.0f}", f"{up:.0f}/{down:.0f}"
    remote = (up + down) * (n - 1) / n  # a worker's own server is not behind its card
    return f"{remote:.0f}/{remote:.0f}", ""


def payload_gb(operation: str, mib: float) -> float:
    """Return the GB that all workers send and receive together."""
    both = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0 + 1.0 / WORKERS}[operation]
    return WORKERS * both * mib * MIB / 1e9


def run_side(network: Network, side: str, servers: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run a side once; returns its figures by operation."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": network.address(HOSTS[0]),
        "MASTER_PORT": str(free_ports()),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.NamedTemporaryFile() as start:
        np.zeros(WORKERS).tofile(start)
        if side == "gloo":
            return measure(network, side, environment, [], start.name, options)
        hosts = server_hosts() if servers == "dedicated" else HOSTS
        with axon_cluster(network, hosts, workers=WORKERS) as (processes, coordinator):
            environment["AXON_PS_COORDINATOR"] = coordinator
            return measure(network, side, environment, processes, start.name, options)


def measure(
    network: Network,
    side: str,
    environment: dict[str, str],
    servers: Sequence[subprocess.Popen[Any]],
    start: str,
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Start the workers, and read counters around every operation's rounds; `start` is the file of their `Start`."""
    sizes = ["--mib", str(options.mib), "--rounds", str(options.rounds), "--warmup", str(options.warmup)]
    command = [sys.executable, str(HERE / "collective_worker.py"), side, "--start", start, *sizes]
    workers = [
        network.popen(
            host,
            command,
            env=environment | {"RANK": str(rank), "AXON_PS_NODE": host},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for rank, host in enumerate(HOSTS)
    ]
    processes, figures = [*workers, *servers], {}
    for operation in OPERATIONS:
        expect(workers[0], "READY")
        before = Sample.take(network, processes, network.hosts)
        go_on(workers[0])
        expect(workers[0], "DONE")
        after = Sample.take(network, processes, network.hosts)
        go_on(workers[0])
        figures[operation] = {
            "cpu_s": (after.cpu_s - before.cpu_s) / options.rounds,
            "worker_mib": after.per_step(before, options.rounds, HOSTS),
            "server_mib": after.per_step(before, options.rounds, server_hosts()),
        }
    times_s = []
    for worker in workers:
        output, _ = worker.communicate(timeout=RUN_TIMEOUT_S)
        if worker.returncode:
            raise RuntimeError(f"a worker of {side} ended with {worker.returncode}")
        times_s.append(json.loads(output.strip().splitlines()[-1])["times_s"])
    for operation in OPERATIONS:
        figures[operation]["times_s"] = [max(rounds) for rounds in zip(*(t[operation] for t in times_s), strict=True)]
    return figures


def raw_cpu_s_per_gb() -> float:
    """Measure CPU seconds per GB of both ends of a raw gRPC stream on loopback, with 1 MiB messages that are copied."""
    total = 256 * MIB
    arguments = ["--total-bytes", str(total), "--chunk-bytes", str(MIB)]
    server = subprocess.Popen(
        [sys.executable, str(HERE / "raw_stream.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    port = int(server.stdout.readline())

    async def push() -> float:
        client, frames = RawClient(f"127.0.0.1:{port}"), make_frames(total, MIB)
        await client.push(frames[:16], copy=True)
        before_s = cpu_s(os.getpid()) + cpu_s(server.pid)
        for _ in range(4):
            await client.push(frames, copy=True)
        used_s = cpu_s(os.getpid()) + cpu_s(server.pid) - before_s
        await client.close()
        return used_s / (4 * total / 1e9)

    try:
        return asyncio.run(push())
    finally:
        server.stdin.close()
        server.wait()


def rows_of(servers: str, sides: dict[str, list[dict[str, dict[str, Any]]]], mib: int) -> list[dict[str, Any]]:
    """Return the lines of one place."""
    rows = []
    for operation in OPERATIONS:
        medians: dict[str, float] = {}
        for side, runs in sides.items():
            times_s = [t for run in runs for t in run[operation]["times_s"]]
            medians[side] = statistics.median(times_s)
            worker_mib, server_mib = runs[-1][operation]["worker_mib"], runs[-1][operation]["server_mib"]
            for_worker, for_server = theory(operation, side, servers, mib)
            cpu = statistics.median(run[operation]["cpu_s"] for run in runs) / payload_gb(operation, mib)
            ours = side == "axon"
            rows.append(
                {
                    "servers": servers,
                    "operation": operation,
                    "side": side,
                    "median_s": round(medians[side], 3),
                    "slowest_s": round(max(times_s), 3),
                    "ratio": round(medians["axon"] / medians["gloo"], 3) if ours and "gloo" in medians else None,
                    "target": TARGETS.get(servers, {}).get(operation, 1.0) if ours else None,
                    "cpu_s_per_gb": round(cpu, 2),
                    "gb_per_cpu_s": round(1 / cpu, 2) if cpu else None,
                    "worker_rx_mib": round(worker_mib[0], 1),
                    "worker_tx_mib": round(worker_mib[1], 1),
                    "worker_theory": for_worker,
                    "server_rx_mib": round(server_mib[0], 1),
                    "server_tx_mib": round(server_mib[1], 1),
                    "server_theory": for_server,
                    "times_s": times_s,
                }
            )
    return rows


def main() -> None:
    """Run both places, or print the reason why namespaces cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--congestion", default=CONGESTION, help="TCP's congestion control")
    parser.add_argument("--places", nargs="+", default=["dedicated", "own"])
    parser.add_argument("--sides", nargs="+", default=["gloo", "axon"])
    parser.add_argument("--repeats", type=int, default=2, help="times each side runs")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of a run")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one run a side, two rounds; writes no file")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.rounds = 1, 2
    raw = round(raw_cpu_s_per_gb(), 2)
    rows: list[dict[str, Any]] = []
    try:
        with Network(HOSTS + server_hosts(), rate_mbit=options.rate_mbit, congestion=options.congestion) as network:
            for place in options.places:
                sides: dict[str, list[dict[str, dict[str, Any]]]] = {side: [] for side in options.sides}
                for _ in range(options.repeats):
                    for side, runs in sides.items():
                        runs.append(run_side(network, side, place, options))
                rows += rows_of(place, sides, options.mib)
    except NetworkUnavailable as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    report.table(
        f"{options.mib} MiB f32, {options.rate_mbit:g} Mbit/s", COLUMNS, [[r[c] for c in COLUMNS] for r in rows]
    )
    print(f"Raw gRPC over loopback, one way, received bytes copied: {raw} CPU seconds per GB.")
    if not options.quick:
        settings = {k: v for k, v in vars(options).items() if k != "quick"}
        report.write("collectives_netns", rows, raw_grpc_cpu_s_per_gb=raw, settings=settings)


if __name__ == "__main__":
    main()
