"""The main job under every launcher, with the same losses: a check, not a measurement.

    python benchmarks/launchers.py            # make lab NAME=launchers

The launchers are `axon-ps run`, torchrun, torchrun on two hosts (network namespaces; needs root) and mpirun. Each
starts two workers for 20 steps of `examples/train_gpt.py`, whose script does not know its launcher. At the end no
process of any launcher is left. Launchers that this machine lacks (mpirun, root) are left out, with a message.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from axon_ps_lab import report
from netns import Network, NetworkUnavailable

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SIZE = [
    *("--layers", "2", "--channels", "64", "--heads", "2", "--context", "64"),
    *("--batch", "4", "--eval-windows", "16", "--sample-bytes", "20"),
]
SETTLED = ["--compute", "float32", "--time-budget-s", "0"]  # results do not depend on the machine's speed
LIMIT_S = 900.0
SHOWN = 4000  # last characters of a failed run's output
MARK = "AXON_PS_LAUNCHERS_RUN"


def program(steps: int, out: Path) -> list[str]:
    """Return the script and its arguments."""
    return [str(ROOT / "examples" / "train_gpt.py"), "--steps", str(steps), *SIZE, *SETTLED, "--out", str(out)]


def environment(mark: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without variables of axon_ps, with a mark by which a run's processes are found."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("AXON_PS_", "MASTER_"))}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**ours, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark, **(more or {})}


def left_over(mark: str) -> list[int]:
    """Return the processes that a run has left behind."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and int(directory.name) != os.getpid():
            try:
                variables = (directory / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or belongs to another user
                continue
            if f"{MARK}={mark}".encode() in variables:
                found.append(int(directory.name))
    return found


def on_one_host(command: Sequence[str], mark: str) -> str:
    """Run a command to its end; returns its output."""
    done = subprocess.run(
        command, env=environment(mark), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with code {done.returncode}:\n{done.stdout[-SHOWN:]}")
    return done.stdout


def of_host(is_first: bool, address: str) -> list[str]:
    """Return the options of an agent in a namespace, which has no name by which to find its address."""
    return ["--rdzv-conf", f"is_host={is_first}", "--local-addr", address]


def on_two_hosts(steps: int, out: Path, mark: str) -> str:
    """Run the same command on two hosts; returns both outputs."""
    with Network(["node0", "node1"]) as network, tempfile.TemporaryFile("w+") as log:
        command = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        command += ["--rdzv-id", mark, "--rdzv-endpoint", f"{network.address('node0')}:29400"]
        agents = [
            network.popen(
                host,
                [*command, *of_host(host == "node0", network.address(host)), *program(steps, out)],
                env=environment(mark, {"AXON_PS_INSECURE": "1", "AXON_PS_NODE": host}),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for host in network.hosts
        ]
        codes = [agent.wait(LIMIT_S) for agent in agents]
        log.seek(0)
        output = log.read()
    if any(codes):
        raise SystemExit(f"torchrun on two hosts exited with codes {codes}:\n{output[-SHOWN:]}")
    return output


def main() -> None:
    """Run all launchers, compare the losses, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="launchers whose name contains this")
    options = parser.parse_args()
    mpirun = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none"]
    here: dict[str, list[str]] = {
        "axon-ps run": [str(BIN / "axon-ps"), "run", "--nproc-per-node", "2"],
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
        "torchrun, two hosts": [],
        "mpirun": [*mpirun, "-n", "2", sys.executable],
    }
    rows: list[dict[str, object]] = []
    seen: set[tuple[str, ...]] = set()
    for name, command in here.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            mark, out, began_s = f"{os.getpid()}-{len(rows)}", Path(directory), time.monotonic()
            if command and shutil.which(command[0]) is None:
                print(f"{name:>20}: left out, there is no {command[0]}")
                continue
            try:
                if command:
                    output = on_one_host([*command, *program(options.steps, out)], mark)
                else:
                    output = on_two_hosts(options.steps, out, mark)
            except NetworkUnavailable as error:
                print(f"{name:>20}: left out, {error}")
                continue
            if (match := re.search(r"validation loss: (\S+(?: → \S+)*) nats", output)) is None:
                raise SystemExit(f"{name} printed no losses:\n{output}")
            losses, seconds = match[1].split(" → "), round(time.monotonic() - began_s, 1)
            if left := left_over(mark):
                raise SystemExit(f"{name} left processes behind: {left}")
            rows.append({"launcher": name, "losses": losses})
            seen.add(tuple(losses))
            print(f"{name:>20}: {' '.join(losses)} nats/byte, {seconds} s")
    if len(seen) > 1:
        raise SystemExit("the losses differ")
    if not options.only:
        report.write("launchers", rows, steps=options.steps)


if __name__ == "__main__":
    main()
