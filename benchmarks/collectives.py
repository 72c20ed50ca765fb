"""Collectives of processes on one host: axon_ps over shared memory, beside gloo, Open MPI and a memory copy.

All systems of a row are measured within the same seconds, one after the other, `--rounds` times. Arrays are new in each
round: pages differ in speed, and a process would keep the good ones. A row has the medians; a ratio is the median of
the ratios within a round. A time is that of the slowest rank, per operation, over several operations one after the
other. Sizes are those of the full buffer: the array of all_reduce, the output of all_gather, the input of
reduce_scatter. For "memcpy" every rank copies the full buffer at the same time.

Open MPI needs `mpirun` and a Python with mpi4py (`--mpi-python`); without them its column is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from axon_ps_lab import report

RANK = Path(__file__).with_name("collectives_rank.py")
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
SIZES_OF_MANY = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SYSTEMS = ("axon", "registered", "gloo", "openmpi", "memcpy")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
MANY = 8  # fewer sizes are measured from so many ranks on


class Team:
    """Processes that measure together."""

    def __init__(self, n: int, commands: Sequence[Sequence[str]], listener: Listener) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        self._processes = [subprocess.Popen(command, env=environment) for command in commands]
        self._ranks: list[Connection[Any, Any]] = [listener.accept() for _ in range(n)]
        for rank in self._ranks:
            rank.recv()

    def say(self, *word: Any) -> list[Any]:
        """Send all ranks the same message; returns their answers."""
        for rank in self._ranks:
            rank.send(word)
        return [rank.recv() for rank in self._ranks]

    def close(self) -> None:
        """Let the processes end."""
        for rank in self._ranks:
            rank.send(None)
        for process in self._processes:
            process.wait(60)


@contextlib.contextmanager
def teams(n: int, mpi_python: str) -> Iterator[list[Team]]:
    """Yield a team of axon_ps and gloo, and one of Open MPI if it is installed."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        made = []
        commands = [
            [[sys.executable, str(RANK), f"{directory}/0", "axon", str(r), str(n), directory] for r in range(n)]
        ]
        if mpi_python:
            mpirun = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", str(n)]
            commands.append([[*mpirun, mpi_python, str(RANK), f"{directory}/1", "mpi"]])
        for i, of_team in enumerate(commands):
            with Listener(f"{directory}/{i}", "AF_UNIX", backlog=n) as listener:
                team = Team(n, of_team, listener)
            stack.callback(team.close)
            made.append(team)
        yield made


def measure(n: int, sizes: Sequence[int], rounds: int, mpi_python: str) -> list[dict[str, Any]]:
    """Return a row for each operation and size."""
    rows = []
    with teams(n, mpi_python) as made:
        for size in sizes:
            seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
            cpu: dict[tuple[str, str], list[float]] = defaultdict(list)
            repetitions = max(2, min(500 if n < MANY else 50, (160 << 20) // (size * n + 4096)))
            warm = 2
            for _ in range(rounds):
                can = {what: team for team in made for what in map(tuple, team.say("prepare", size)[0])}
                for what, team in can.items():
                    answers = team.say("measure", *what, repetitions, warm)
                    seconds[what].append(max(s for s, _ in answers))
                    cpu[what].append(sum(c for _, c in answers))
            for operation in OPERATIONS:
                medians = {s: statistics.median(t) for (s, o), t in seconds.items() if o == operation}
                if "axon" not in medians:
                    continue
                row = {"ranks": n, "operation": operation, "size_bytes": size}
                row |= {f"{system}_us": round(medians[system] * 1e6, 1) for system in SYSTEMS if system in medians}
                row |= {
                    f"{system}_cpu_us": round(statistics.median(cpu[system, operation]) * 1e6, 1)
                    for system in ("axon", "gloo")
                }
                for ours in ("axon", "registered"):
                    for peer in ("gloo", "openmpi"):
                        if peer in medians:
                            pairs = zip(seconds[peer, operation], seconds[ours, operation], strict=True)
                            row[f"{ours}_times_{peer}"] = round(statistics.median(t / o for t, o in pairs), 2)
                rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], n: int) -> None:
    """Print the table of one number of ranks."""
    columns = [*(f"{system} us" for system in SYSTEMS), "axon x gloo", "axon x openmpi", "registered x gloo"]
    keys = [*(f"{system}_us" for system in SYSTEMS), "axon_times_gloo", "axon_times_openmpi", "registered_times_gloo"]
    report.table(
        f"{n} ranks, f32, medians (x: how many times as fast)",
        ["operation", "size", *columns],
        [[row["operation"], _size(row["size_bytes"]), *(row.get(key) for key in keys)] for row in rows],
    )


def _size(size_bytes: int) -> str:
    for unit in ("B", "KiB"):
        if size_bytes < 1024:
            return f"{size_bytes} {unit}"
        size_bytes //= 1024
    return f"{size_bytes} MiB"


def _mpi_python(given: str) -> str:
    """Return a Python that can run Open MPI ranks; "" = there is none."""
    if shutil.which("mpirun") is None:
        return ""
    found = subprocess.run([given, "-c", "import mpi4py.MPI"], capture_output=True, check=False)
    return given if found.returncode == 0 else ""


def main() -> None:
    """Measure, print, write `results/collectives.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of the full buffer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two ranks, few sizes and rounds")
    parser.add_argument("--mpi-python", default=sys.executable, help="a Python with mpi4py and numpy")
    parser.add_argument("--no-write", action="store_true", help="only print")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.rounds, arguments.sizes = [2], 3, list(SIZES[:-2])
    mpi_python = _mpi_python(arguments.mpi_python)
    if not mpi_python:
        print("Open MPI is absent: there is no mpirun, or no mpi4py in --mpi-python; its columns stay empty")
    rows = []
    for n in arguments.ranks:
        sizes = arguments.sizes or (SIZES if n < MANY else SIZES_OF_MANY)
        of_n = measure(n, sizes, arguments.rounds, mpi_python)
        show(of_n, n)
        rows += of_n
    if not arguments.no_write:
        report.write("collectives", rows, rounds=arguments.rounds, openmpi=bool(mpi_python))


if __name__ == "__main__":
    main()
