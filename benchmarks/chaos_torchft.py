"""Killed workers: axon_ps with a standby beside torchft 0.2, with the same model, workers and kills.

    pip install 'torchft==0.2.*'     # in an environment of its own, with torch
    python benchmarks/chaos_torchft.py --torchft-python PYTHON [--kills 20]

torchft has no standby: a killed worker is started again, and the others go on without it. Measured are the time from a
kill to the next step that any worker commits, the time until all workers take part again, and the samples that were
handed out and that no committed step has used. A worker of torchft's loop drops the batch of an attempt that did not
commit, as in torchft's own example: its documentation calls its sampler "inherently lossy".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_ps_lab import report
from axon_ps_lab.chaos.campaign import parse
from axon_ps_lab.chaos.run import run_embedded

WORKER = Path(__file__).with_name("chaos_torchft_worker.py")
WORKERS, BATCH, PAUSE_S, LEASE_S, QUIET_S, LONGEST_S = 2, 16, 0.04, 1.0, 0.5, 60.0
Row = dict[str, Any]


class Peer:
    """torchft's job.

    Args:
        python: the Python that has torchft.
        directory: directory for notes and logs.

    Attributes:
        restarts: workers that were started again because they had ended by themselves.
    """

    def __init__(self, python: str, directory: Path) -> None:
        self._python, self._directory = python, directory
        self.restarts = 0
        self._log = open(directory / "log", "wb")  # noqa: SIM115  # closed with the processes that write to it
        self._lighthouse = self._start("--serve", str(LEASE_S), stdout=subprocess.PIPE)
        assert self._lighthouse.stdout is not None
        self._address = self._lighthouse.stdout.readline().decode().strip()
        self._workers = [self._worker(replica) for replica in range(WORKERS)]

    def _start(self, *options: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [self._python, str(WORKER), *options]
        return subprocess.Popen(command, stdout=stdout or self._log, stderr=self._log, env=environment)

    def _worker(self, replica: int) -> subprocess.Popen[bytes]:
        notes = self._directory / f"{replica}"
        committed = [line["committed"] for line in self.notes(replica) if "committed" in line]
        return self._start(
            "--lighthouse", self._address, "--replica", str(replica), "--notes", str(notes),
            "--begin", str(max(committed, default=-1) + 1), "--workers", str(WORKERS), "--batch", str(BATCH),
            "--pause-s", str(PAUSE_S),
        )  # fmt: skip

    def notes(self, replica: int) -> list[Row]:
        """Return the notes of a worker, from all of its lives."""
        path = self._directory / f"{replica}"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def commits(self, of: int = 0) -> list[float]:
        """Return the times at which steps were committed, by at least so many workers."""
        return sorted(n["at"] for r in range(WORKERS) for n in self.notes(r) if n.get("of", -1) >= of)

    def wait(self, since: float, of: int) -> float:
        """Return the time at which so many workers first committed a step after `since`."""
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            if after := [at for at in self.commits(of) if at > since]:
                return after[0]
            self._start_again()
            time.sleep(0.02)
        raise RuntimeError(f"no step of {of} workers within {LONGEST_S:g} s:\n{self._tail()}")

    def _start_again(self) -> None:
        """Restart the workers that have ended by themselves, as a launcher does."""
        for replica, process in enumerate(self._workers):
            if process.poll() is not None:
                self.restarts += 1
                self._workers[replica] = self._worker(replica)

    def _tail(self) -> str:
        return (self._directory / "log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def kill(self, replica: int) -> tuple[float, float]:
        """Kill a worker and start it again; returns seconds to the next commit, and until all workers take part."""
        began = time.monotonic()
        self._workers[replica].kill()
        self._workers[replica].wait(LONGEST_S)
        self._workers[replica] = self._worker(replica)
        return self.wait(began, 1) - began, self.wait(began + 0.01, WORKERS) - began

    def close(self) -> None:
        """End all processes."""
        for process in (*self._workers, self._lighthouse):
            process.kill()
            process.wait(LONGEST_S)
        self._log.close()

    def samples(self) -> tuple[int, int, int]:
        """Count the samples used, lost and doubled. The samples of a worker's last attempt do not count as lost."""
        used: Counter[int] = Counter()
        given: set[int] = set()
        for replica in range(WORKERS):
            lines = self.notes(replica)
            attempts = [line for line in lines if "attempt" in line]
            given.update(i for line in attempts[:-1] for i in line["samples"])
            current: list[int] = []
            for line in lines:
                if "attempt" in line:
                    current = line["samples"]
                elif line["used"]:
                    used.update(current)
        return len(used), len(given - used.keys()), sum(count - 1 for count in used.values())


def torchft(python: str, kills: int, seed: int) -> Row:
    """Measure torchft."""
    chance, waits = random.Random(seed), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as directory:
        peer = Peer(python, Path(directory))
        try:
            peer.wait(time.monotonic(), WORKERS)
            for _ in range(kills):
                time.sleep(QUIET_S)
                waits.append(peer.kill(chance.randrange(WORKERS)))
                print(f"torchft: next commit {waits[-1][0]:.2f} s, all {waits[-1][1]:.2f} s", flush=True)
        finally:
            peer.close()
        used, lost, doubled = peer.samples()
    return row("torchft 0.2", [a for a, _ in waits], [b for _, b in waits]) | {
        "samples_used": used, "samples_lost": lost, "samples_doubled": doubled, "ended_by_themselves": peer.restarts,
    }  # fmt: skip


def ours(kills: int, seed: int) -> Row:
    """Measure axon_ps."""
    text = (
        f"seed = {seed}\nfaults = {kills}\nquiet_s = {QUIET_S}\nmoments = 0\n[kinds.kill]\nroles = ['worker']\n"
        f"[embedded]\nworkers = {WORKERS}\nbatch = {BATCH}\npause_s = {PAUSE_S}\nlease_s = {LEASE_S}\nspared_from = 1\n"
    )
    result = run_embedded(parse(text, "ours"), lambda line: print(line, flush=True))
    if result.problems or result.samples is None:
        raise SystemExit("; ".join(result.problems))
    waits = [o.next_commit_s for o in result.outcomes if o.next_commit_s is not None]
    commits = [commit.at for commit in result.events.commits]
    ends = [(d.began, next((at for at in commits if at > d.complete), d.complete)) for d in result.events.dealt]
    complete = [end - began for began, end in ends]
    return row("axon_ps, a standby", waits, complete) | {
        "samples_used": result.samples.used,
        "samples_lost": result.samples.lost,
        "samples_doubled": result.samples.doubled,
        "ended_by_themselves": len(result.events.ends),
    }


def row(what: str, waits: Sequence[float], complete: Sequence[float]) -> Row:
    """Return a row with the times of one side."""
    return {
        "what": what,
        "kills": len(waits),
        "next_commit_median_s": round(statistics.median(waits), 3),
        "next_commit_worst_s": round(max(waits), 3),
        "all_workers_median_s": round(statistics.median(complete), 3),
        "all_workers_worst_s": round(max(complete), 3),
    }


def main() -> None:
    """Measure both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft-python", default=sys.executable, help="the Python that has torchft")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = [ours(options.kills, options.seed), torchft(options.torchft_python, options.kills, options.seed)]
    report.table("A worker is killed", list(rows[0]), [list(r.values()) for r in rows])
    settings = {"workers": WORKERS, "batch": BATCH, "pause_s": PAUSE_S, "lease_and_heartbeat_timeout_s": LEASE_S}
    report.write("chaos_torchft", rows, settings=settings, load_average=round(os.getloadavg()[0], 2))


if __name__ == "__main__":
    main()
