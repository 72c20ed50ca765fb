"""A running job under a campaign: its processes on this host are struck, and its coordinator's feed is read."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from axon_ps.errors import AxonError, ConfigurationError, Unreachable
from axon_ps.rpc.security import Security
from axon_ps.wire.events import Status
from axon_ps_lab.chaos.campaign import Job
from axon_ps_lab.chaos.checkpoints import truncated
from axon_ps_lab.chaos.figures import Events
from axon_ps_lab.chaos.memory import resident_bytes
from axon_ps_lab.chaos.observer import Observer
from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.faults.driver import send_signals
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.proxy import owner_of

_POLL_S: Final = 0.05
_RESTORE_S: Final = 60.0


class RunningJob:
    """A job that the campaign has not started, as a context manager.

    A killed process has to be started again by the launcher of the job: `axon-ps run`, systemd, Kubernetes.

    Args:
        job: the settings by which its processes are found.
        coordinator: the coordinator's "host:port".
        security: the security of connections to the coordinator.
        name: the job's name; empty = the job that the coordinator runs.

    Attributes:
        observer: follows the coordinator's feed.
        events: the observed events.
    """

    def __init__(self, job: Job, coordinator: str, security: Security, name: str) -> None:
        self._job, self._address = job, coordinator
        self.observer = Observer(lambda: coordinator, security, name)
        self.events = Events()
        self._workers = self._shards = 0

    def __enter__(self) -> RunningJob:
        """Follow the job's feed, and count its members.

        Raises:
            Unreachable: the coordinator does not answer.
        """
        self.observer.__enter__()
        if (status := self.observer.status(5.0)) is None:
            self.observer.__exit__(None, None, None)
            raise Unreachable(
                f"no coordinator answers at {self._address}; a campaign with [job] strikes a job that runs: start it, "
                "or give [embedded] for one of the campaign's own"
            )
        self._workers, self._shards = len(status.membership.workers), len(status.membership.shards)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.observer.__exit__(kind, error, traceback)

    @property
    def newest(self) -> float:
        """The time of the newest commit that is known."""
        return max((commit.at for commit in self.observer.commits[-3:]), default=0.0)

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for a condition.

        Raises:
            AxonError: the condition did not hold in time.
        """
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise AxonError(f"{what} within {limit_s:g} s")
            time.sleep(_POLL_S)

    def is_complete(self) -> bool:
        """Return True if the job has as many members as when the campaign began, and all copies."""
        status = self.observer.status()
        return (
            status is not None
            and len(status.membership.workers) >= self._workers
            and len(status.membership.shards) >= self._shards
            and not any(model.lacking for model in status.models)
        )

    def deal(self, fault: PlannedFault) -> tuple[str, float, str]:
        """Inject a fault, and return when it is over; see `Struck.deal`.

        Raises:
            InvalidRequest: it cannot strike a job that the campaign has not started.
            ConfigurationError: its process is not found on this host, or belongs to another user.
        """
        time.sleep(fault.after_s)
        if fault.kind is Fault.TRUNCATED_FILE:
            began = time.monotonic()
            return fault.role, began, truncated(self._job.checkpoint_dir, fault, self._restore)
        pids = self._pids(fault.role)
        pid = pids[fault.index % len(pids)]
        send = partial(_send, pid)
        began = time.monotonic()
        if fault.kind is Fault.KILL:
            send(signal.SIGKILL)
        else:
            send_signals(fault.kind, [send], fault.seconds)
        return f"{fault.role} ({pid})", began, ""

    def _restore(self, uri: str) -> str:
        return self.observer.restore(uri, _RESTORE_S)

    def weigh(self, number: int) -> None:
        """Note the resident bytes of every process that can be found."""
        for role in ("coordinator", "shard", "worker"):
            try:
                pids = self._pids(role)
            except ConfigurationError:
                continue
            for pid in pids:
                if (resident := resident_bytes(pid)) > 0:
                    self.events.memory[f"{role} ({pid})"].append((number, resident))

    def collected(self) -> Events:
        """Return all observed events."""
        self.events.commits = sorted(self.observer.commits, key=lambda commit: commit.at)
        self.events.signs = sorted(self.observer.signs, key=lambda sign: sign.at)
        return self.events

    # ------------------------------------------------------------------ processes

    def _pids(self, role: str) -> list[int]:
        """Return the processes of a role, on this host.

        Raises:
            ConfigurationError: there are none.
        """
        if files := self._job.pid_files.get(role):
            return [_read_pid(Path(file)) for file in files]
        status = self.observer.status()
        addresses = [self._address] if role == "coordinator" else _addresses(status, role)
        if found := [pid for address in addresses if (pid := listener(address)) > 0]:
            return found
        raise ConfigurationError(
            f"no {role} of the job was found on this host by the addresses {', '.join(addresses) or '(none)'}; give "
            f"pid_files.{role} in [job], or leave the role out of the kinds' roles"
        )


def _addresses(status: Status | None, role: str) -> list[str]:
    return [m.address for m in status.membership.shards] if status is not None and role == "shard" else []


def _read_pid(path: Path) -> int:
    """Return the process id in a file.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain the id of a running process.
    """
    try:
        pid = int(path.read_text(encoding="ascii"))
        os.kill(pid, 0)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is to hold the id of a process that runs and that this user may signal ({error}); correct "
            "pid_files in [job]"
        ) from error
    return pid


def listener(address: str) -> int:
    """Return the process of this host that listens at "host:port"; -1 = there is none, or it is on another host."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ("127.0.0.1", "::1", "localhost", "0.0.0.0", socket.gethostname()):
        return -1
    return owner_of(int(port), [int(name) for name in os.listdir("/proc") if name.isdigit()])


def _send(pid: int, number: int) -> None:
    """Send a signal.

    Raises:
        ConfigurationError: this user may not signal the process.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ConfigurationError(f"process {pid} is another user's; run the campaign as the user of the job") from error
