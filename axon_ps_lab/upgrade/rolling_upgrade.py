"""A job trains while its processes go one by one from the oldest axon_ps of this protocol version to this one.

    make lab NAME=upgrade            # needs the history of the repository

Coordinator, shard servers and workers are replaced in turn; no committed step may be lost. Then members of the former
protocol join a job of this one, and the other way round; they have to be refused by a message that names the former
protocol.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.host.children import Child
from axon_ps.rpc.security import Security
from axon_ps.wire.build import OLDEST
from axon_ps.wire.events import Status
from axon_ps_lab.upgrade.older import ROOT, extract, oldest_commit, set_protocol

JOB = "upgrade"
SERVERS = 2
WORKERS = 2
HANG_S = 120.0
STEPS = 20
"""Commits between two replacements."""

WORKER = Path(__file__).with_name("upgrade_worker.py")


class UpgradedJob:
    """The processes of a job, each with a given axon_ps.

    Args:
        directory: directory for the job's files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = ""
        self.children: dict[str, Child] = {}
        self.logs: dict[str, list[Path]] = {}

    def start(self, name: str, package: Path, command: list[str], *, service: bool = True, **variables: str) -> Child:
        """Start a process with the axon_ps of a directory."""
        log = self.directory / f"{name}-{len(self.logs.setdefault(name, []))}.log"
        self.logs[name].append(log)
        ours = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")}
        environment = ours | {"AXON_PS_JOB": JOB, "AXON_PS_LOG": "plain", "PYTHONPATH": str(package), **variables}
        child = Child.start(
            name,
            [sys.executable, "-P", *command],
            environment,
            last_signal=signal.SIGKILL,
            output=log,
            stdin=True,
            ready=service,
        )
        self.children[name] = child
        return child

    def service(self, name: str, package: Path, *options: str) -> Child:
        """Start a service; its options come after its command, which is the first word of its name."""
        return self.start(name, package, ["-m", "axon_ps.cli.main", name.split()[0], *options], AXON_PS_DRAIN_S="30")

    def coordinator(self, package: Path) -> None:
        """Start the coordinator, on its former port if it had one."""
        port = self.address.rpartition(":")[2] or "0"
        state = str(self.directory / "state.sqlite")
        child = self.service(
            "coordinator",
            package,
            *("--port", port, "--state", state, "--world-size", str(WORKERS), "--shards", str(SERVERS)),
            *("--min-workers", "1", "--replication", "2"),
        )
        self.address = _listening(child)

    def shard(self, index: int, package: Path) -> Child:
        """Start a shard server."""
        options = ("--coordinator", self.address, "--port", "0", "--rank", str(index), "--threads", "1")
        return self.service(f"shard {index}", package, *options)

    def worker(self, index: int, package: Path) -> Child:
        """Start a worker."""
        return self.start(
            f"worker {index}",
            package,
            [str(WORKER), str(self.directory / "end")],
            service=False,
            AXON_PS_COORDINATOR=self.address,
            RANK=str(index),
            WORLD_SIZE=str(WORKERS),
        )

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a process and wait until it has ended."""
        child = self.children.pop(name)
        child.send_signal(number)
        child.wait(HANG_S)
        child.end()

    def status(self) -> Status:
        """Return the job's status, from its coordinator."""

        async def ask() -> Status:
            async with OperatorClient(self.address, security=Security(), job=JOB) as operator:
                return await operator.status()

        return asyncio.run(ask())

    def until(self, what: str, condition: Callable[[Status], bool]) -> Status:
        """Wait until the job's status meets the condition, and return it."""
        deadline = time.monotonic() + HANG_S
        while True:
            status = self.status()
            if condition(status):
                return status
            dead = [c for c in self.children.values() if c.exit_code is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"--- {child.name}\n{child.output}" for child in dead or self.children.values())
                raise AssertionError(f"not so within {HANG_S:g} s: {what}; it waits for {status.pending}\n{logs}")
            time.sleep(0.05)

    def train(self, workers: int = WORKERS) -> int:
        """Wait until all are there and `STEPS` more steps have committed; returns the version."""
        complete = self.until(
            "all members are there, and no slice lacks a copy",
            lambda s: (
                len(s.membership.workers) == workers
                and len(s.membership.shards) == SERVERS
                and not s.membership.waiting_for
                and bool(s.models)
                and s.models[0].initialized
                and not s.models[0].lacking
            ),
        )
        begins = complete.models[0].version
        return self.until("it trains", lambda s: s.models[0].version >= begins + STEPS).models[0].version

    def lines(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the lines of JSON of each process that had this name."""
        for log in self.logs[name]:
            lines = log.read_text(encoding="utf-8").splitlines()
            yield [
                json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")
            ]  # without a line that was cut by a kill

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.end()


def _listening(child: Child) -> str:
    line = child.ready_line(time.monotonic() + HANG_S)
    assert line, f"{child.name} did not start:\n{child.output}"
    return line.partition(" ")[0]


def upgrade(older: Path, newer: Path, directory: Path) -> dict[str, Any]:
    """Train while all processes are replaced; returns the versions, the number of steps and the reasons of aborts."""
    job, versions = UpgradedJob(directory), {}
    try:
        job.coordinator(older)
        for index in range(SERVERS):
            _listening(job.shard(index, older))
        for index in range(WORKERS):
            job.worker(index, older)
        versions["all of the oldest"] = job.train()
        job.stop("coordinator")
        job.coordinator(newer)
        versions["coordinator"] = job.train()
        for index in range(SERVERS):
            job.stop(f"shard {index}")
            _listening(job.shard(index, newer))
            versions[f"shard {index}"] = job.train()
        for index in range(WORKERS):
            job.stop(f"worker {index}", signal.SIGKILL)
            job.worker(index, newer)
            versions[f"worker {index}"] = job.train()
        last = versions[f"worker {WORKERS - 1}"] + STEPS
        (job.directory / "end.tmp").write_text(str(last))
        (job.directory / "end.tmp").rename(job.directory / "end")
        for index in range(WORKERS):
            child = job.children.pop(f"worker {index}")
            child.wait(HANG_S)
            assert child.end() == 0, child.output
        committed: set[int] = set()
        aborted = []
        for index in range(WORKERS):
            packages = []
            for first, *steps in job.lines(f"worker {index}"):
                packages.append(Path(first["package"]).parents[1])
                seen = [step["version"] for step in steps if step["committed"]]
                assert seen == list(range(seen[0], seen[0] + len(seen))), f"worker {index} missed a version: {seen}"
                committed.update(seen)
                aborted += [step["reason"] for step in steps if not step["committed"]]
            assert packages == [older, newer], packages
        assert committed >= set(range(1, last + 1)), sorted(set(range(1, last + 1)) - committed)
        return {"versions": versions, "committed": last, "lost": 0, "aborted": aborted}
    finally:
        job.close()


def refused(before: Path, newer: Path, directory: Path) -> dict[str, str]:
    """Let members of the former protocol join a job of this one, and the other way round; returns their messages."""
    printed = {}
    pairs = {"coordinator": (before, newer), "member": (newer, before)}
    for older, (coordinator, member) in pairs.items():
        job = UpgradedJob(directory / older)
        job.directory.mkdir()
        try:
            job.coordinator(coordinator)
            for name, child in (("shard", job.shard(0, member)), ("worker", job.worker(0, member))):
                child.wait(HANG_S)
                output = child.output
                assert child.exit_code not in (None, 0), f"{name} was let in:\n{output}"
                lines = [line for line in output.splitlines() if f"(protocol {OLDEST - 1})" in line]
                assert lines, f"{name} does not name the protocols:\n{output}"
                printed[f"{name}, {older} of the protocol before"] = lines[-1].strip()
        finally:
            job.close()
    return printed


def main() -> None:
    """Run the upgrade and the refused joins, and print their results."""
    commit = oldest_commit()
    with tempfile.TemporaryDirectory(prefix="axon-ps-upgrade-") as name:
        directory = Path(name)
        packages = [directory / "oldest", directory / "before"]
        for package in packages:
            package.mkdir()
            extract(commit, package)
        set_protocol(packages[1], OLDEST - 1)
        for what in ("job", "refused"):
            (directory / what).mkdir()
        print(f"from {commit[:12]} to {ROOT}")
        print(json.dumps(upgrade(packages[0], ROOT, directory / "job"), indent=2))
        print(json.dumps(refused(packages[1], ROOT, directory / "refused"), indent=2))


if __name__ == "__main__":
    main()
