"""The command `kill`: ends a process of a job on this machine at once, to see what its death costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from axon_ps.cli import options as o
from axon_ps.cli.settings import DEFAULT_JOB, load
from axon_ps.errors import ConfigurationError

_PROGRAMS = ("axon_ps.cli.main", "axon-ps")


class Killed(StrEnum):
    """The kinds of process that may be killed."""

    SHARD = "shard"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    PROXY = "proxy"


@dataclass(frozen=True)
class Running:
    """A process of a job.

    Attributes:
        pid: its process id.
        kind: its kind.
        job: name of the job.
        rank: its rank; None = it has none, or its command line has no rank.
    """

    pid: int
    kind: Killed
    job: str
    rank: int | None

    def __str__(self) -> str:
        """Return it as text for errors."""
        rank = "" if self.rank is None else f" {self.rank}"
        return f"{self.kind}{rank} of job {self.job!r} (process {self.pid})"


def kill(
    kind: Annotated[Killed, typer.Argument(help="What to kill.")],
    rank: Annotated[int | None, typer.Argument(help="Its rank; the only one needs none.", min=0)] = None,
    job: o.Job = None,
) -> None:
    """Kill a process of yours on this machine that belongs to a job, as kill -9 does: to see what its death costs.

    Shard servers, coordinators and proxies are found by their command, workers if `axon-ps run` has started them. A
    user other than root finds a service of his own if its command has --job, as those of `axon-ps run` have.
    """
    name = load(job=job).job
    found = list(running())
    meant = [p for p in found if (p.kind, p.job) == (kind, name) and rank in (None, p.rank)]
    if len(meant) != 1:
        wanted = f"{kind}{'' if rank is None else f' {rank}'} of job {name!r}"
        there = ", ".join(map(str, found)) or "no process of any job"
        how_many = "none is" if not meant else f"{len(meant)} are"
        raise ConfigurationError(f"kill one process: {wanted} is wanted, and {how_many} there; there is {there}")
    os.kill(meant[0].pid, signal.SIGKILL)
    print(f"killed {meant[0]}")


def running() -> Iterator[Running]:
    """Yield this user's processes on this machine that belong to a job."""
    workers: dict[int, tuple[int, Running]] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            if directory.stat().st_uid != os.geteuid():
                continue
            command, environment = _strings(directory / "cmdline"), _environment(directory)
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        pid = int(directory.name)
        if (service := _service(pid, command, environment)) is not None:
            yield service
        elif environment is not None and "AXON_PS_JOB" in environment and environment.get("RANK", "").isdigit():
            workers[pid] = parent, Running(pid, Killed.WORKER, environment["AXON_PS_JOB"], int(environment["RANK"]))
    for parent, worker in workers.values():
        if parent not in workers:  # else it is a process that a worker has started
            yield worker


def _environment(directory: Path) -> dict[str, str] | None:
    """Return the variables of a process; None = its memory is private, and we are not root."""
    try:
        return dict(text.split("=", 1) for text in _strings(directory / "environ") if "=" in text)
    except PermissionError:
        return None


def _service(pid: int, command: Sequence[str], environment: Mapping[str, str] | None) -> Running | None:
    at = next((i for i, text in enumerate(command) if text.rpartition("/")[2] in _PROGRAMS), len(command))
    kinds = [kind for kind in Killed if kind is not Killed.WORKER and kind in command[at + 1 : at + 2]]
    if not kinds:
        return None
    rank = _option(command, "--rank")
    job = _option(command, "--job")
    if not job and environment is None:
        return None
    job = job or (environment or {}).get("AXON_PS_JOB") or DEFAULT_JOB
    return Running(pid, kinds[0], job, int(rank) if rank.isdigit() else None)


def _option(command: Sequence[str], name: str) -> str:
    """Return the value that a command gives for an option; "" = none."""
    for text, following in zip(command, [*command[1:], ""], strict=True):
        if text == name:
            return following
        if text.startswith(f"{name}="):
            return text.partition("=")[2]
    return ""


def _strings(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").split("\0")[:-1]
