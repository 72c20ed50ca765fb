"""Watches a job in containers from outside: its versions, members and copies, several times a second."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import AxonError, again
from axon_ps.rpc.security import Security
from axon_ps.wire.events import Status

EVERY_S = 0.1
SOON_S = 150.0


def output_of(*command: str) -> str:
    """Return the output of a command.

    Raises:
        RuntimeError: it failed; the message has its output.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def address_of(container: str) -> str:
    """Return the address at which this machine reaches a container."""
    return output_of("docker", "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container)


@dataclass
class Seen:
    """The observations since `Watch.mark`.

    Attributes:
        committed: number of committed steps.
        aborted: number of aborted attempts.
        pause_s: the longest time without a committed step.
    """

    committed: int = 0
    aborted: int = 0
    pause_s: float = 0.0


class Watch:
    """Asks for the status of the job until it is closed; a context manager.

    Args:
        address: returns the coordinator's "host:port", which may change.
        token: the job's secret.
        job: its name, which the certificate that is made from the secret has too.

    Attributes:
        lost: number of committed steps that were undone; it must be 0.
    """

    def __init__(self, address: Callable[[], str], token: str, job: str) -> None:
        self._address, self._security, self._job = address, Security(token=token, tls=True), job
        self._changed = threading.Condition()
        self._over = False
        self._status: Status | None = None
        self._refused: Exception | None = None
        self._committed_s = time.monotonic()
        self._aborted, self._generation = 0.0, 0
        self.seen = Seen()
        self.lost = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def mark(self) -> None:
        """Begin to count anew; `settled` waits until the members have changed since."""
        with self._changed:
            self._generation = 0 if self._status is None else self._status.membership.generation
            self.seen = Seen()
            self._committed_s = time.monotonic()

    @property
    def version(self) -> int:
        """The version of the first model, by the last status."""
        return 0 if self._status is None else self._status.version

    def until(self, what: str, condition: Callable[[Status], bool], timeout_s: float = SOON_S) -> None:
        """Wait until the job's status meets a condition.

        Raises:
            AssertionError: it does not in time.
        """
        with self._changed:
            met = self._changed.wait_for(lambda: self._status is not None and condition(self._status), timeout_s)
        assert met, f"it has not happened: {what}; {self._status}; the last call that failed: {self._refused!r}"

    def settled(self, workers: int, shards: int, steps: int = 5) -> None:
        """Wait until the members have changed to so many, every slice has its copies, and some more steps were made."""

        def is_settled(status: Status) -> bool:
            members = status.membership
            there = len(members.workers), len(members.shards)
            settled = members.complete and not any(m.lacking for m in status.models)
            return settled and there == (workers, shards) and members.generation > self._generation

        self.until(f"{workers} workers and {shards} shard servers, no slice lacks a copy", is_settled)
        version = self.version
        self.until("steps are made", lambda status: status.version >= version + steps)

    async def _watch(self) -> None:
        while not self._over:
            try:
                async with OperatorClient(self._address(), security=self._security, job=self._job) as operator:
                    while not self._over:
                        self._take(await operator.status(timeout_s=2.0))
                        await asyncio.sleep(EVERY_S)
            except (AxonError, RuntimeError) as error:  # the coordinator is down, or its container
                self._refused = again(error)
                await asyncio.sleep(EVERY_S)

    def _take(self, status: Status) -> None:
        now = time.monotonic()
        with self._changed:
            before, self._status = self._status, status
            aborted = status.counters.get("steps_aborted", 0.0)
            if before is not None:
                self.seen.aborted += int(max(0.0, aborted - self._aborted))
                if status.version < before.version:
                    self.lost += before.version - status.version
                if status.version > before.version:
                    self.seen.committed += status.version - before.version
                    self.seen.pause_s = max(self.seen.pause_s, now - self._committed_s)
                    self._committed_s = now
            self._aborted = aborted
            self._changed.notify_all()


SMALL: Sequence[str] = (
    "examples/train_gpt.py", "--layers=2", "--channels=64", "--heads=2", "--context=32", "--batch=2",
    "--eval-windows=8", "--compute=float32", "--time-budget-s=0", "--steps=1000000", "--out=/checkpoints/small",
)  # fmt: skip
"""The command of a worker with a small model, which makes a million small steps."""
