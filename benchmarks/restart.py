"""From kill -9 of a worker to the next step that all workers commit, with a new process or with a standby.

`axon-ps run` trains a small model with two workers. One of them is killed between steps, once its launcher and the
standby are idle. The time is that of the first step that its successor commits.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from axon_ps_lab import report

TRAIN = """
import os, sys, time
import torch
import axon_ps
from axon_ps.parallel import AdamW, FullyShardedDataParallel as FSDP

with axon_ps.World.init() as world, open(sys.argv[1], "a", buffering=1) as log:
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = FSDP(torch.nn.Sequential(*layers), world.default_group, unit_types={torch.nn.Linear})
    optimizer = AdamW(model, lr=1e-3)
    while world.kv_get("stop") is None:
        model(torch.randn(8, 512)).square().mean().backward()
        if optimizer.step().committed and world.num_replicas == 2:
            print(world.rank, os.getpid(), time.monotonic(), file=log)
        optimizer.zero_grad()
        if os.path.exists(sys.argv[1] + ".stop"):
            world.kv_put("stop", b"1")
        time.sleep(0.02)
"""
LONGEST_S = 120.0
CALM_S = 1.5


def commits(log: Path) -> list[tuple[int, int, float]]:
    """Return (rank, process id, time) of every commit."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(int(rank), int(pid), float(when_s)) for rank, pid, when_s in lines if when_s]


def await_rest(launcher: psutil.Process, working: set[int]) -> None:
    """Wait until, of the processes below the launcher, only those that train or serve use the processor."""
    deadline, calm = time.monotonic() + LONGEST_S, 0
    while calm < 3 and time.monotonic() < deadline:
        waiting = [p for p in launcher.children(recursive=True) if "axon_ps.cli.launch.standby" in p.cmdline()]
        before = [sum(p.cpu_times()[:2]) for p in waiting if p.pid not in working]
        time.sleep(CALM_S / 3)
        after = [sum(p.cpu_times()[:2]) for p in waiting if p.pid not in working]
        calm = calm + 1 if before == after else 0


def measure(options: list[str], directory: Path) -> float:
    """Return the seconds from the kill to the next commit of all workers."""
    script, log = directory / "train.py", directory / "log"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "axon_ps.cli.main", "run", "--nproc-per-node", "2", *options]
    with subprocess.Popen([*command, str(script), str(log)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + LONGEST_S
            while len(commits(log)) < 40 and time.monotonic() < deadline:
                time.sleep(0.1)
            pids = {rank: pid for rank, pid, _ in commits(log)}
            await_rest(psutil.Process(process.pid), set(pids.values()))
            killed_s = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            while time.monotonic() < killed_s + LONGEST_S:
                after = [when_s for rank, pid, when_s in commits(log) if rank == 1 and pid != pids[1]]
                if after:
                    return after[0] - killed_s
                time.sleep(0.01)
            raise SystemExit("nobody took the dead worker's place")
        finally:
            Path(f"{log}.stop").touch()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.terminate()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    ways = {"started again": ["--max-restarts", "1"], "standby": ["--standby", "1"]}
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if options.quick else options.rounds):
        for name, arguments in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                times_s[name].append(round(measure(arguments, Path(directory)), 3))
    rows = [{"what": name, "median_s": statistics.median(t), "worst_s": max(t)} for name, t in times_s.items()]
    report.table("kill -9 to next commit of all", ("what", "median_s", "worst_s"), [list(r.values()) for r in rows])
    report.write("restart", rows, workers=2, load_average=os.getloadavg()[0], times_s=times_s)


if __name__ == "__main__":
    main()
