"""A distant shard server: one unit's AllGather and ReduceScatter, and whole steps, at several round trips.

Coordinator and shard server are on one host, and a worker on another. A line with a rate and a delay is between them
(`distance_link.py`); the kernels' own TCP runs over it. A plain TCP connection over the same line is measured, too.
Each time has a lower bound:

    transfer              the unit's bytes at the line's rate, and one round trip
    step, FULL_SHARD      two gathers of each unit at the line's rate, and one round trip
    step, SHARD_GRAD_OP   one gather of each unit, the last one only after all pushes, and one round trip

Pushes go the other way at the same time.

Measurements begin once TCP's windows have grown, which takes some steps. Hosts do not shrink the windows in pauses
(`net.ipv4.tcp_slow_start_after_idle=0`).

    python benchmarks/distance.py [--rtt-ms 0 10 50 100] [--rate-mbit 500] [--mib 64]

It needs root: hosts are network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axon_ps_lab import report
from distance_link import Distance

HERE = Path(__file__).parent
REPEATED = 7
WARM = 5
WARM_STEPS = 12
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
UNITS = 8

TCP = """
import socket, sys, time
if sys.argv[1] == "serve":
    listening = socket.create_server((sys.argv[2], 7000))
    print("up", flush=True)
    connection, _ = listening.accept()
    block = bytes(1 << 20)
    while count := connection.recv(8):
        for _ in range(int(count)):
            connection.sendall(block)
else:
    connection, buffer, times = socket.create_connection((sys.argv[2], 7000)), bytearray(1 << 20), []
    for _ in range(int(sys.argv[4])):
        began, got = time.perf_counter(), 0
        connection.sendall(sys.argv[3].ljust(8).encode())
        while got < int(sys.argv[3]) << 20:
            got += connection.recv_into(buffer)
        times.append(time.perf_counter() - began)
    print(times)
"""

TRANSFERS = """
import json, sys
from axon_ps.types import DType
from axon_ps.worker.world import World
from data_plane import Ours
count = int(sys.argv[2])
worker = Ours(World.init(), int(sys.argv[1]) << 18, DType.F32)
times = {"AllGather": [worker.gather() for _ in range(count)], "ReduceScatter": [worker.push() for _ in range(count)]}
worker.world.close()
print(json.dumps(times))
"""

STEPS = """
import json, sys, time
import torch
from torch import nn
import axon_ps
from axon_ps import parallel
torch.set_num_threads(1)
units, side, count = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(units)))
with axon_ps.World.init() as world:
    strategy = getattr(parallel.ShardingStrategy, sys.argv[4])
    model = parallel.FSDP(model, world.default_group, sharding_strategy=strategy,
                          auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    optimizer, x, times = parallel.AdamW(model, lr=1e-4), torch.randn(2, side), []
    for _ in range(count):
        began = time.perf_counter()
        model(x).square().mean().backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


@contextlib.contextmanager
def job(network: Distance) -> Iterator[dict[str, str]]:
    """Start a coordinator and a shard server at "home"; yields the environment of a worker "away"."""
    home = network.address("home")
    coordinator = ["coordinator", "--port", "7000", "--world-size", "1", "--shards", "1", "--state", "memory"]
    shard = ["shard", "--coordinator", f"{home}:7000", "--port", "7100"]
    services = []
    for command in (coordinator, shard):
        read, write = os.pipe()
        options = ["--host", home, "--insecure", "--ready-fd", str(write), "--log-level", "ERROR"]
        argv = [sys.executable, "-P", "-m", "axon_ps.cli.main", *command, *options]
        services.append(network.popen("home", argv, pass_fds=[write]))
        os.close(write)
        with os.fdopen(read) as ready:
            assert ready.readline(), f"{command[0]} did not start"
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": home, "MASTER_PORT": "7000"}
    try:
        yield {
            **os.environ, **ranks, "AXON_PS_COORDINATOR": f"{home}:7000", "AXON_PS_INSECURE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        }  # fmt: skip
    finally:
        for service in reversed(services):
            service.terminate()
            service.wait()


def said(network: Distance, script: str, *arguments: object, env: dict[str, str] | None = None) -> Any:
    """Run a script "away"; returns its output, from JSON."""
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    process = network.popen("away", command, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(process.communicate(timeout=300)[0])


def measure(rate_mbit: float, rtt_ms: float, mib: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one round trip."""
    rtt_s, line_s = rtt_ms / 1e3, (mib << 20) * 8 / (rate_mbit * 1e6)

    def row(what: str, times: list[float], bound_s: float) -> dict[str, Any]:
        median_s = statistics.median(times[-REPEATED:])
        return {"rtt_ms": rtt_ms, "what": what, "bound_s": bound_s, "s": median_s, "ratio": median_s / bound_s}

    with Distance(("home", "away"), rate_mbit=rate_mbit, rtt_ms=rtt_ms) as network:
        home = network.address("home")
        serving = network.popen("home", [sys.executable, "-c", TCP, "serve", home], stdout=subprocess.PIPE, text=True)
        assert serving.stdout is not None
        serving.stdout.readline()
        yield row("one TCP connection", said(network, TCP, "read", home, mib, REPEATED + WARM), line_s + rtt_s)
        with job(network) as env:
            for what, times in said(network, TRANSFERS, mib, REPEATED + WARM, env=env).items():
                yield row(what, times, line_s + rtt_s)
        side = int(((mib << 18) / 2 / UNITS) ** 0.5)
        model_s = UNITS * side * side * 4 * 8 / (rate_mbit * 1e6)
        for strategy in STRATEGIES:
            with job(network) as env:
                times = said(network, STEPS, UNITS, side, REPEATED + WARM_STEPS, strategy, env=env)
                passes = 2 if strategy == "FULL_SHARD" else 1 + 1 / UNITS
                yield row(f"step, {strategy}", times, passes * model_s + rtt_s)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 10.0, 50.0, 100.0])
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--mib", type=int, default=64, help="bytes of the unit; a step's model has half as many")
    parser.add_argument("--quick", action="store_true", help="two round trips of a small unit, writes no file")
    options = parser.parse_args()
    rtts, mib = ([0.0, 20.0], 8) if options.quick else (options.rtt_ms, options.mib)
    rows = []
    for rtt_ms in rtts:
        for row in measure(options.rate_mbit, rtt_ms, mib):
            rows.append(row)
            print(f"{rtt_ms:g} ms, {row['what']}: {row['s']:.2f} s", file=sys.stderr, flush=True)
    report.table("A shard server far away", list(rows[0]), [list(row.values()) for row in rows])
    if not options.quick:
        print(report.write("distance", rows, rate_mbit=options.rate_mbit, mib=mib, units=UNITS))


if __name__ == "__main__":
    main()
