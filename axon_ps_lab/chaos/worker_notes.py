"""`WorkerNotes`: the attempts, commits and aborts that the workers of a campaign's own job write to files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from axon_ps_lab.chaos import training
from axon_ps_lab.chaos.figures import Commit, ComputedAttempt, Events
from axon_ps_lab.faults.notes import Notes


class WorkerNotes:
    """Reads the notes of workers, which are named by numbers, since process ids are used again.

    Args:
        directory: the folder of their files.
        events: attempts and aborts are added to them.

    Attributes:
        newest: the time of the newest commit that is known.
    """

    def __init__(self, directory: Path, events: Events) -> None:
        self._directory, self._events = directory, events
        self._notes = Notes()
        self._commits: dict[tuple[int, int], float] = {}
        self.newest = 0.0

    def is_working(self, number: int) -> bool:
        """Return True if a worker has joined the job."""
        return self._path(training.NOTES, number).exists()

    def is_ready(self, number: int) -> bool:
        """Return True if a worker waits for its rank, or has waited."""
        return self._path(training.WAITING, number).exists()

    def read(self, number: int) -> None:
        """Read the new notes of a worker."""
        for found in self._notes.new(self._path(training.NOTES, number)):
            self._take(number, found)

    def end_at(self, steps: int) -> int:
        """Let workers end after some more steps; returns the version at which they do."""
        version = max((version for version, _ in self._commits), default=0) + steps
        new = self._directory / "new"
        new.write_text(str(version), encoding="ascii")
        new.rename(self._directory / training.LAST)
        return version

    def commits(self) -> list[Commit]:
        """Return the commits, in the order of their times."""
        found = (Commit(version=v, generation=g, at=at) for (v, g), at in self._commits.items())
        return sorted(found, key=lambda commit: commit.at)

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f"{kind}{number}"

    def _take(self, number: int, found: dict[str, Any]) -> None:
        if "attempt" in found:
            version, generation = found["attempt"]
            self._events.attempts.append(
                ComputedAttempt(
                    process=number,
                    version=version,
                    generation=generation,
                    epoch=found["epoch"],
                    samples=tuple(found["samples"]),
                )
            )
        elif "committed" in found:
            version, generation = found["committed"]
            self.newest = max(self.newest, found["at"])
            self._commits[version, generation] = min(found["at"], self._commits.get((version, generation), found["at"]))
        elif "aborted" in found:
            self._events.aborted.append(time.monotonic())
