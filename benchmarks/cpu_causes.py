"""CPU time of a step by cause: the samples of `perf` in all processes of a side, FSDP2 or axon_ps.

Model, places and sides are those of whole_step.py, whose column cpu_s_per_step is divided here: seconds a step of all
workers together, and of all shard servers. The cause of a sample follows from its library and function:

    products     matrix products (MKL): forward and backward
    torch        the rest of torch: activations, copies, scaling of gradients
    gloo         gloo's own code; what it copies counts as kernel or libc
    loops        our compiled loops: sums, updates, compression, digests
    copies       memcpy and its like in the C library
    sockets      the kernel's copies between sockets and processes
    kernel       the rest of the kernel: TCP, wake-ups, page faults
    python       the interpreter and its modules
    protobuf     encoding and decoding of headers
    grpc         gRPC's C core
    rest         all others: allocation, other libraries

The benchmark needs `perf` (Debian: linux-perf) and root.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axon_ps_lab import report
from whole_step import ONE_MACHINE, SIDES, Figures, Team, one_run, shape

HERE = Path(__file__).parent
HERTZ = 499
CAUSES = (
    ("sockets", r"kernel.*(_copy_to_iter|_copy_from_iter|copy_user|rep_movs)"),
    ("kernel", r"\[kernel|\[k\]|vmlinux|\.ko"),
    ("gloo", r"gloo::"),
    ("products", r"mkl_|gemm|dnnl|oneapi"),
    ("torch", r"libtorch|libc10|libshm"),
    ("loops", r"\[JIT\]|perf-\d+\.map|libgomp|/memfd"),
    ("copies", r"libc\.so.*(mem(move|cpy|set))"),
    ("python", r"libpython|python3|lib-dynload|_asyncio|_socket|_struct|_ctypes"),
    ("protobuf", r"_message\.|_upb"),
    ("grpc", r"cygrpc"),
)
"""By cause, a pattern of library and function; the first match counts."""
COLUMNS = ("place", "dtype", "strategy", "side", "of", "cpu_s", *(cause for cause, _ in CAUSES), "rest")


def cause_of(library: str, function: str) -> str:
    """Return the cause that a sample counts for."""
    return next((cause for cause, like in CAUSES if re.search(like, f"{library} {function}")), "rest")


def fractions_of(data: Path) -> dict[str, float]:
    """Return the fraction of each cause in the samples of a file."""
    profile = subprocess.run(
        ["perf", "report", "-i", str(data), "--no-children", "--sort", "dso,sym", "-F", "sample,dso,sym", "-t", "|"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: Counter[str] = Counter()
    for line in profile.splitlines():
        count, _, rest = line.partition("|")
        if count.strip().isdigit():
            library, _, function = rest.partition("|")
            found[cause_of(library.strip(), function.strip())] += int(count)
    return {cause: count / found.total() for cause, count in found.items()}


class Sampled:
    """Samples of the timed steps of all runs.

    Attributes:
        cpu_s: CPU seconds, by "workers" and "servers".
        fractions: the fraction of each cause, by the same.
    """

    def __init__(self, directory: Path) -> None:
        self.cpu_s: dict[str, float] = {}
        self.fractions: dict[str, dict[str, float]] = {}
        self._directory = directory

    @contextmanager
    def steps(self, workers: Sequence[int], servers: Sequence[int]) -> Iterator[None]:
        """Sample processes, by their ids, while the steps run."""
        groups = {of: pids for of, pids in (("workers", workers), ("servers", servers)) if pids}
        before = {of: _cpu_s(pids) for of, pids in groups.items()}
        perfs = {of: self._record(of, pids) for of, pids in groups.items()}
        yield
        for of, pids in groups.items():
            self.cpu_s[of] = _cpu_s(pids) - before[of]
            perfs[of].terminate()
            perfs[of].wait()
            self.fractions[of] = fractions_of(self._directory / of)

    def _record(self, of: str, pids: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["perf", "record", "-q", "-F", str(HERTZ), "-o", str(self._directory / of), "-p", ",".join(map(str, pids))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds of live processes, all threads, finer than a tick."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in _threads(pids))


def _threads(pids: Sequence[int]) -> list[str]:
    return [f"{pid}/task/{thread}" for pid in pids for thread in os.listdir(f"/proc/{pid}/task")]


def rows_of(setting: dict[str, Any], sampled: Sampled, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a line for the workers, and one for the servers, if there are any."""
    for of, fractions in sampled.fractions.items():
        cpu_s = sampled.cpu_s[of] / steps
        causes = {name: round(fractions.get(name, 0.0) * cpu_s, 3) for name in (*dict(CAUSES), "rest")}
        yield {**setting, "of": of, "cpu_s": round(cpu_s, 3), **causes}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", choices=ONE_MACHINE, default=["sockets"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--strategies", nargs="+", default=["full_shard", "shard_grad_op"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["fsdp2", "axon"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clip", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    """Run every setting once."""
    options = parse()
    if shutil.which("perf") is None:
        sys.exit("there is no perf here, which takes the samples; install it (Debian: apt install linux-perf)")
    rows: list[dict[str, Any]] = []
    team = Team.of(options.workers, 1, options.servers)
    settings = itertools.product(options.places, options.dtypes, options.strategies, options.sides)
    for name, dtype, strategy, side in settings:
        command = [sys.executable, str(HERE / "step_worker.py"), *SIDES[side], *shape(options)]
        command += ["--dtype", dtype, "--strategy", strategy]
        with tempfile.TemporaryDirectory() as directory, ONE_MACHINE[name](team.all_hosts) as place:
            sampled = Sampled(Path(directory))
            replication = 0 if side == "fsdp2" else 1
            one_run(place, team, command, options.steps, Figures(), replication=replication, around=sampled.steps)
        setting = {"place": name, "dtype": dtype, "strategy": strategy, "side": side}
        rows += rows_of(setting, sampled, options.steps)
        print(f"{name} {dtype} {strategy} {side}", file=sys.stderr, flush=True)
    report.table("CPU seconds of a step, by cause", COLUMNS, [[row[c] for c in COLUMNS] for row in rows])
    report.write("cpu_causes", rows, settings=vars(options))


if __name__ == "__main__":
    main()
