"""AllGather and ReduceScatter of a 256 MiB unit against raw gRPC streams and iperf3, on loopback, alternating.

There is one worker, this process, and one shard server. The raw peers are a `grpc.aio` server and its client, each a
process of its own, with identity serializers, one connection, and the same chunk size and channel options
(raw_stream.py). The variants are:

- The receiver of a raw stream drops its bytes, or copies them to their destination. axon_ps always copies (AllGather)
  or adds (ReduceScatter). The acceptance compares axon_ps with the raw stream that drops, the harder of the two.
- The raw peers run with malloc's defaults, or with the settings of our processes (`host.malloc`). These speed up the
  raw stream, too. They are a part of axon_ps, so both rows are shown.
- axon_ps sends through gRPC, which the acceptance is about, or by direct memory, the default for processes of one host.

Last, four workers gather the same slice, and the server counts the chunks that it encoded.

A raw client whose malloc trims after every message is half as fast as another one, for its whole life. So the
processes of both sides are started several times, and the ratios are medians over the rounds of all starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.host.ports import free_ports
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import DEFAULT_CHUNK_NUMEL, PlanOptions
from axon_ps.sharding.precision import WirePrecision
from axon_ps.testing.cluster import LocalCluster
from axon_ps.types import DType, OptimizerSpec, parse_dtype
from axon_ps.worker.environment import worker_config
from axon_ps.worker.world import World
from axon_ps_lab import report
from netns import stop

HERE = Path(__file__).parent
MIB = 1 << 20
WORKERS_TOGETHER = 4
REFERENCE = {"AllGather": "raw pull", "ReduceScatter": "raw push"}
Measure = Callable[[], float]


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that `action` takes."""
    begin_s = time.perf_counter()
    action()
    return time.perf_counter() - begin_s


class Ours:
    """One worker of a job with one unit: gathers the unit, and pushes to it."""

    def __init__(self, world: World, numel: int, dtype: DType, chunk_numel: int = DEFAULT_CHUNK_NUMEL) -> None:
        self.world = world
        unit = build_unit("bulk", [("weight", (numel,), DType.F32)])
        spec = JobSpec(
            layout=Layout(units=(unit,)),
            precision=WirePrecision(param=dtype, grad=dtype),
            options=PlanOptions(chunk_numel=chunk_numel),
        )
        self.steps, registered = self.world.models.register(spec)
        if registered.upload:
            self.steps.parameters.upload(0, np.ones(numel, np.float32))
        self.hyper = ({"lr": 0.0},)
        self.steps.register_optimizer(OptimizerSpec(name="sgd", groups=self.hyper, group_of=(0,)))
        self.steps.view.wait_initialized(registered)
        self.values = np.zeros(numel, dtype.numpy)

    def gather(self) -> float:
        """Return the seconds of an AllGather of the whole unit."""
        return timed(lambda: self.steps.parameters.gather(0, self.values).wait())

    def push(self) -> float:
        """Return the seconds of a ReduceScatter of the whole unit, without the vote and the update that follow."""
        ticket = self.steps.ticket()
        begin_s = time.perf_counter()
        work = self.steps.gradients.push(0, self.values, ticket)
        work.wait()
        spent_s = time.perf_counter() - begin_s
        self.steps.vote(ticket, [work], max_norm=0.0, hyper=self.hyper)
        self.steps.parameters.gather(0, self.values).wait()  # the update is over once the new version can be gathered
        return spent_s


@contextmanager
def ours(numel: int, dtype: DType, chunk_numel: int, *, direct_memory: bool) -> Iterator[dict[str, Measure]]:
    """Start a cluster of one server, with this process as its worker; yields the measurements."""
    how = " by direct memory" if direct_memory else ""
    with LocalCluster(shards=1, world_size=1) as cluster:
        config = replace(worker_config(cluster.env(0)), direct_memory=direct_memory)
        worker = Ours(World.init(config), numel, dtype, chunk_numel)
        try:
            yield {f"AllGather{how}": worker.gather, f"ReduceScatter{how}": worker.push}
        finally:
            worker.world.close()


@contextmanager
def raw(total_bytes: int, chunk_bytes: int, *, tuned: bool) -> Iterator[dict[str, Measure]]:
    """Start a raw server and a raw client, two processes; `tuned`: with axon_ps's settings of malloc."""
    sizes = ["--total-bytes", str(total_bytes), "--chunk-bytes", str(chunk_bytes)]
    command = [sys.executable, str(HERE / "raw_stream.py"), *sizes, *(["--retain-message-memory"] if tuned else [])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    server = subprocess.Popen(command, **pipes)
    assert server.stdout is not None
    client = subprocess.Popen([*command, "--client", f"127.0.0.1:{server.stdout.readline().strip()}"], **pipes)

    def told(line: str) -> float:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(line + "\n")
        return float(client.stdout.readline())

    how = ", our malloc" if tuned else ""
    try:
        yield {
            f"raw pull{how}": lambda: told("pull"),
            f"raw pull + copy{how}": lambda: told("pull copy"),
            f"raw push{how}": lambda: told("push"),
            f"raw push + copy{how}": lambda: told("push copy"),
        }
    finally:
        stop([client, server])


def iperf3_gbs() -> float | None:
    """Return the GB/s of one TCP stream on loopback; None without iperf3."""
    if not shutil.which("iperf3"):
        return None
    port = str(free_ports())
    server = subprocess.Popen(["iperf3", "-s", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            done = subprocess.run(["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "2", "-J"], capture_output=True)
            received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
            if received:
                return float(received["bits_per_second"]) / 8e9
            time.sleep(0.1)  # the server does not listen yet
        return None
    finally:
        stop([server])


def encodings(numel: int) -> dict[str, Any]:
    """Gather the same slice with four workers at once; returns the chunks served, and the chunks encoded."""
    with LocalCluster(shards=1, world_size=WORKERS_TOGETHER) as cluster:
        results = cluster.run_workers(gather_together, args=(numel,), timeout_s=120.0)
    before, after = results[0].value
    return {
        "workers": WORKERS_TOGETHER,
        "chunks_of_slice": -(-numel // DEFAULT_CHUNK_NUMEL),
        "chunks_served": int(after["chunks_out"] - before["chunks_out"]),
        "chunks_encoded_ever": int(after["encodings"]),
    }


def gather_together(numel: int) -> tuple[dict[str, float], dict[str, float]]:
    """Gather together with the other workers; returns the shard server's counters before and after."""
    with World.init() as world:
        worker = Ours(world, numel, DType.F32)
        before = world.server_statistics(0)
        world.barrier("begin")
        worker.gather()
        world.barrier("end")
        return before, world.server_statistics(0)


def one_start(total_bytes: int, dtype: DType, rounds: int, chunk_numel: int) -> dict[str, list[float]]:
    """Return the seconds that each peer took; the peers alternate, `rounds` times."""
    chunk_bytes = chunk_numel * dtype.itemsize
    times_s: dict[str, list[float]] = {}
    numel = total_bytes // dtype.itemsize
    with (
        ours(numel, dtype, chunk_numel, direct_memory=False) as mine,
        ours(numel, dtype, chunk_numel, direct_memory=True) as direct,
        raw(total_bytes, chunk_bytes, tuned=False) as theirs,
        raw(total_bytes, chunk_bytes, tuned=True) as tuned,
    ):
        peers = mine | theirs | tuned | direct
        for number in range(-1, rounds):  # the first round warms up
            for name, action in peers.items():
                spent_s = action()
                if number >= 0:
                    times_s.setdefault(name, []).append(spent_s)
    return times_s


def measure(dtype: DType, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all peers, in processes started `options.starts` times; returns rows with medians."""
    command = [sys.executable, __file__, "--one-start", "--mib", str(options.mib), "--rounds", str(options.rounds)]
    command += ["--chunk-numel", str(options.chunk_numel), "--dtypes", dtype.value]
    times_s: dict[str, list[float]] = {}
    for _ in range(options.starts):
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for name, some in json.loads(told).items():
            times_s.setdefault(name, []).extend(some)
    total_bytes = options.mib * MIB
    reference = {f"{name}{how}": peer for name, peer in REFERENCE.items() for how in ("", " by direct memory")}

    def ratio(name: str, peer: str) -> float:
        """Return the speed of `name` over that of `peer`: the median over rounds, so that slow rounds cancel out."""
        return round(statistics.median(p / t for t, p in zip(times_s[name], times_s[peer], strict=True)), 3)

    return [
        {
            "what": name,
            "dtype": dtype.value,
            "mib": options.mib,
            "gb_per_s": round(total_bytes / statistics.median(t) / 1e9, 3),
            "best_gb_per_s": round(total_bytes / min(t) / 1e9, 3),
            "of_raw": ratio(name, reference[name]) if name in reference else None,
            "of_raw_with_copy": ratio(name, f"{reference[name]} + copy") if name in reference else None,
            "of_raw_our_malloc": ratio(name, f"{reference[name]}, our malloc") if name in reference else None,
            "times_ms": [round(one * 1e3, 1) for one in t],
        }
        for name, t in times_s.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--starts", type=int, default=5, help="how often all processes are started")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer in a start")
    parser.add_argument("--chunk-numel", type=int, default=DEFAULT_CHUNK_NUMEL, help="elements of a chunk")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--quick", action="store_true", help="64 MiB, one start, f32 only")
    parser.add_argument("--one-start", action="store_true", help="only print the times of one start, as JSON")
    options = parser.parse_args()
    if options.one_start:
        dtype = parse_dtype(options.dtypes[0])
        print(json.dumps(one_start(options.mib * MIB, dtype, options.rounds, options.chunk_numel)))
        return
    if options.quick:
        options.mib, options.starts, options.dtypes = 64, 1, ["f32"]
    rows = [row for name in options.dtypes for row in measure(parse_dtype(name), options)]
    wire = iperf3_gbs()
    if wire is not None:
        rows.append({"what": "iperf3, one stream", "gb_per_s": round(wire, 3)})
    shared = encodings(options.mib * MIB // 4)
    ratios = ("of_raw", "of_raw_with_copy", "of_raw_our_malloc")
    columns = ("what", "dtype", "mib", "gb_per_s", "best_gb_per_s", *ratios)
    report.table("Data plane, one stream on loopback", columns, [[row.get(c, "") for c in columns] for row in rows])
    print(
        f"{shared['workers']} workers gathered the same slice of {shared['chunks_of_slice']} chunks: "
        f"{shared['chunks_served']} chunks served, {shared['chunks_encoded_ever']} encoded."
    )
    report.write(
        "data_plane",
        rows,
        encode_once=shared,
        settings={"mib": options.mib, "starts": options.starts, "rounds": options.rounds},
    )


if __name__ == "__main__":
    main()
