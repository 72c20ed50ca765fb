"""Cost of metrics and traces in a training step, in processor time and in time.

Two workers train a residual MLP of 2M parameters in 8 units under FULL_SHARD on two shard servers. With the coordinator
they are five processes, all on this machine. Turns of equally many steps alternate: without, with, with, without. All
processor time of the job is counted, including that for exporting what was recorded, but not that of the scraper and of
the collector.

Turns differ by more than a hundredth, the cost to be shown. So the cause is enlarged, and the difference divided by the
same factor: *every* step is traced, for one in 100; the five processes are scraped *ten times a second*, for once a
second and once in 15 s, Prometheus's usual interval. The results also have turns with 1 step in 100 and 1 scrape a
second: they show how much can be seen without enlarging.

Each round has new jobs. An interval is of 95 %, by Student's t over the rounds.

    python benchmarks/observability.py [--rounds 5] [--steps 30] [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "third_party"))

import psutil

from axon_ps.host.ports import free_ports
from axon_ps_lab import report

WORKERS, SHARDS = 2, 2
PROCESSES = 1 + SHARDS + WORKERS
WIDTH, BLOCKS, TOKENS = 352, 8, 256
TOKEN = "of-this-benchmark"
EXPORT_S = 1.0
"""Seconds between two exports of recorded data; a turn ends after its last export."""

SCRAPES_PER_S, INTERVALS_S = 10.0, (15.0, 1.0)
EVERY = 100
LIMIT_S = 120.0
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for an interval of 95 %, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Turn:
    """A turn of some steps.

    Attributes:
        cpu_s: processor time of all processes of the job.
        wall_s: duration of the steps.
        scrapes: number of scrapes of all processes meanwhile.
    """

    cpu_s: float
    wall_s: float
    scrapes: int = 0

    def __add__(self, other: Turn) -> Turn:
        return Turn(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s, self.scrapes + other.scrapes)


@dataclass(frozen=True)
class Difference:
    """The turns of a round, for one cause.

    Attributes:
        without: the turns without the cause.
        with_: the turns with the cause.
    """

    without: Turn
    with_: Turn

    @property
    def cpu(self) -> float:
        """The part of the job's processor time that the cause adds."""
        return self.with_.cpu_s / self.without.cpu_s - 1

    @property
    def time(self) -> float:
        """The part of a step's time that the cause adds."""
        return self.with_.wall_s / self.without.wall_s - 1

    @property
    def every_s(self) -> float:
        """Seconds between scrapes: the time of the undisturbed steps, over the number of scrapes of the others."""
        return self.without.wall_s / self.with_.scrapes


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its interval of 95 %; infinite for a single value."""
    if len(values) < 2:
        return values[0], math.inf
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), T_95[min(len(values) - 1, len(T_95)) - 1] * spread


def work(directory: Path) -> None:
    """Run a worker: make as many steps as the file `go` says, until the job ends; rank 0 writes the time to `took`."""
    import torch
    import torch.nn.functional as F

    import axon_ps
    from axon_ps.parallel import AdamW, FullyShardedDataParallel
    from step_worker import Block, ResidualMLP

    torch.set_num_threads(1)
    done, allowed, pause = 0, 0, threading.Event()
    with axon_ps.World.init() as world:
        model = FullyShardedDataParallel(ResidualMLP(WIDTH, BLOCKS), world.default_group, unit_types={Block})
        optimizer = AdamW(model.parameters(), lr=1e-4)
        target = torch.zeros(TOKENS, dtype=torch.long)
        while True:
            while world.rank == 0 and done == allowed:  # rank 1 waits for rank 0 in the next step
                allowed, began_s = number_in(directory / "go"), time.perf_counter()
                pause.wait(0.01)
            F.cross_entropy(model(torch.randn(TOKENS, WIDTH)), target).backward()  # type: ignore[no-untyped-call]
            if not optimizer.step().committed:
                raise RuntimeError("a step was not committed: the figures would not be of whole steps")
            optimizer.zero_grad()
            done += 1
            if world.rank == 0 and done == allowed:
                write(directory / "took", time.perf_counter() - began_s)


def number_in(path: Path) -> int:
    """Return the number in a file; 0 if there is no file."""
    return int(path.read_text()) if path.exists() else 0


def write(path: Path, value: float) -> None:
    """Write a file atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(str(value))
    partial.rename(path)


class Job:
    """A job that trains when it is told to.

    Args:
        directory: directory of the files `go` and `took`, and of the log.
        port: port of the coordinator's metrics; the next ports are those of the other processes.
        flags: options of `axon-ps run`.
        env: further variables.
    """

    def __init__(self, directory: Path, port: int, *flags: str, **env: str) -> None:
        directory.mkdir()
        self._ports = range(port, port + PROCESSES)
        self._directory = directory
        self._steps = 0
        command = [sys.executable, "-m", "axon_ps.cli.main", "run", "--shards", str(SHARDS), "--nproc-per-node",
                   str(WORKERS), "--http-port", str(port), *flags, __file__, "--work", str(directory)]  # fmt: skip
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, "AXON_PS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **env},
            )  # fmt: skip

    def turn(self, steps: int, scrapes_per_s: float = 0.0) -> Turn:
        """Make the job train so many steps, with so many scrapes a second."""
        took = self._directory / "took"
        took.unlink(missing_ok=True)
        before_s, self._steps = self._cpu_s(), self._steps + steps
        write(self._directory / "go", self._steps)
        deadline_s = time.monotonic() + LIMIT_S
        with scraped(self._ports, scrapes_per_s) as scrapes:
            while not took.exists():
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError((self._directory / "log").read_text()[-3000:])
                time.sleep(0.02)
        time.sleep(1.5 * EXPORT_S)
        return Turn(self._cpu_s() - before_s, float(took.read_text()), len(scrapes))

    def close(self) -> None:
        """End the job."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _cpu_s(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(t.user + t.system for t in times)


@contextmanager
def scraped(ports: Sequence[int], per_s: float) -> Iterator[list[int]]:
    """Scrape all processes of a job so often, as Prometheus does, or never at 0; yields each scrape's bytes."""
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for port in ports]
    over = threading.Event()
    sizes: list[int] = []

    def scrape() -> None:
        due_s = time.monotonic()
        while not over.wait(max(0.0, due_s - time.monotonic())):
            sizes.append(sum(map(_metrics, connections)))
            due_s += 1 / per_s

    thread = threading.Thread(target=scrape)
    if per_s:
        thread.start()
    try:
        yield sizes
    finally:
        over.set()
        if per_s:
            thread.join()
        for connection in connections:
            connection.close()


def _metrics(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": "gzip"})
    reply = connection.getresponse()
    size = len(reply.read())
    if reply.status != http.client.OK:
        raise RuntimeError(f"a scrape was answered with {reply.status}")
    return size


def difference(without: Job, with_: Job, steps: int, scrapes_per_s: float = 0.0) -> Difference:
    """Alternate turns of two jobs, or of one job that is scraped in two of them."""
    before = without.turn(steps)
    between = with_.turn(steps, scrapes_per_s) + with_.turn(steps, scrapes_per_s)
    return Difference(before + without.turn(steps), between)


def measure(steps: int) -> dict[str, Difference]:
    """Measure a round: one difference for each cause."""
    from otlp_receiver import receiving

    with tempfile.TemporaryDirectory() as directory, receiving() as collector, ExitStack() as stack:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": f"{1000 * EXPORT_S:.0f}"}
        port = free_ports(3 * PROCESSES)
        jobs = []
        for n, every in enumerate((0, 1, EVERY)):
            flags = ["--trace-every", str(every)] if every else []
            job = Job(Path(directory) / str(every), port + n * PROCESSES, *flags, **env)
            stack.callback(job.close)
            jobs.append(job)
            job.turn(steps // 2 + 1)  # warm up
        plain, traced, sampled = jobs
        found = {
            "traces": difference(plain, traced, steps),
            "traces as they are": difference(plain, sampled, steps),
            "metrics": difference(plain, plain, steps, SCRAPES_PER_S),
            "metrics as they are": difference(plain, plain, steps, 1.0),
        }
        if not collector.spans:
            raise RuntimeError("the collector got no spans")
        return found


def row(what: str, measured: str, cpu: Sequence[float], wall: Sequence[float]) -> dict[str, Any]:
    """Return a line of the table: the parts that a cause adds, by round."""
    (cpu_mean, cpu_within), (mean, within) = interval(cpu), interval(wall)
    return {
        "what": what,
        "measured": measured,
        "cpu_percent": round(100 * cpu_mean, 3),
        "cpu_within": round(100 * cpu_within, 3),
        "time_percent": round(100 * mean, 3),
        "time_within": round(100 * within, 3),
    }


def rows_of(rounds: Sequence[dict[str, Difference]]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    traces = [one["traces"] for one in rounds]
    metrics = [one["metrics"] for one in rounds]
    rows = [
        row(f"traces, 1 step in {EVERY}", f"every step, / {EVERY}", [d.cpu / EVERY for d in traces],
            [d.time / EVERY for d in traces])
    ]  # fmt: skip
    for every_s in INTERVALS_S:
        parts = [d.every_s / every_s for d in metrics]
        rows.append(
            row(f"metrics, each {every_s:g} s", f"{SCRAPES_PER_S:g} scrapes a second, / {SCRAPES_PER_S * every_s:g}",
                [d.cpu * part for d, part in zip(metrics, parts, strict=True)],
                [d.time * part for d, part in zip(metrics, parts, strict=True)])
        )  # fmt: skip
    for name, what in (("traces", f"traces, 1 step in {EVERY}"), ("metrics", "metrics, each 1 s")):
        plain = [one[f"{name} as they are"] for one in rounds]
        rows.append(row(what, "as it is", [d.cpu for d in plain], [d.time for d in plain]))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.work is not None:
        return work(options.work)
    rounds = [measure(options.steps) for _ in range(1 if options.quick else options.rounds)]
    rows = rows_of(rounds)
    quiet = [one[name].without for one in rounds for name in ("traces", "metrics")]
    scrapes = [(d.with_.cpu_s - d.without.cpu_s) / d.with_.scrapes for d in (one["metrics"] for one in rounds)]
    traced = [(d.with_.cpu_s - d.without.cpu_s) / (2 * options.steps) for d in (one["traces"] for one in rounds)]
    figures = {
        "step_ms": round(1e3 * statistics.mean(turn.wall_s for turn in quiet) / (2 * options.steps), 1),
        "step_cpu_ms": round(1e3 * statistics.mean(turn.cpu_s for turn in quiet) / (2 * options.steps), 1),
        "traced_step_cpu_ms": round(1e3 * statistics.mean(traced), 1),
        "scrape_cpu_ms": round(1e3 * statistics.mean(scrapes), 1),
    }
    report.table("What metrics and traces add to a step", list(rows[0]), [list(row.values()) for row in rows])
    print(figures)
    if not options.quick:
        size = {"width": WIDTH, "blocks": BLOCKS, "tokens": TOKENS, "workers": WORKERS, "shards": SHARDS}
        print(report.write("observability", rows, **size, rounds=len(rounds), steps=options.steps, **figures))


if __name__ == "__main__":
    main()
