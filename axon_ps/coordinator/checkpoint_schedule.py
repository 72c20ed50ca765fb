"""The schedule of automatic checkpoints. Pure.

Owns: the policy as the user gives it, and the decision that a checkpoint is due. Refuses: to write, verify and remove
checkpoints (the server's `automatic`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from axon_ps.errors import ConfigurationError

FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 300.0
"""Bounds of the pause, in seconds, after a checkpoint that could not be written. The pause doubles each time."""

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """The directory, the times and the number of automatic checkpoints.

    Attributes:
        directory: a directory that the coordinator and all shard servers see: a path, or a URI; empty = none is
            written, and none is restored.
        every_steps: committed steps, of all models together, between two; 0 = steps do not count.
        every_s: seconds between two; 0 = time does not count. Nothing is written while no step commits.
        limit: the number that remain. Older automatic ones are removed.
    """

    directory: str = ""
    every_steps: int = 0
    every_s: float = 0.0
    limit: int = 3

    def __post_init__(self) -> None:
        if self.every_steps < 0 or not 0 <= self.every_s < math.inf:
            raise ConfigurationError(
                f"checkpoints are to be written every {self.every_steps} steps and {self.every_s} s; neither may be "
                "negative or infinite"
            )
        if self.limit < 1:
            raise ConfigurationError(f"{self.limit} checkpoints are to remain; at least one must")
        if self.writes and not self.directory:
            raise ConfigurationError("checkpoints are to be written, and no directory is given: add --checkpoint-dir")

    @classmethod
    def of(cls, directory: str, every: str, limit: int) -> CheckpointPolicy:
        """Make the policy from options. `every` is a text for `parse_every`, or empty: none is written.

        Raises:
            ConfigurationError: there can be no such policy.
        """
        steps, seconds = parse_every(every) if every else (0, 0.0)
        return cls(directory=directory, every_steps=steps, every_s=seconds, limit=limit)

    @property
    def writes(self) -> bool:
        """True if automatic checkpoints are written."""
        return bool(self.every_steps or self.every_s)


def parse_every(text: str) -> tuple[int, float]:
    """Return (steps, seconds) between two checkpoints, one of them 0, from "500" (steps), "90s", "10m" or "2h".

    Raises:
        ConfigurationError: it is something else.
    """
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None or not any(float(number) for number in found.group(1, 2) if number):
        raise ConfigurationError(f"checkpoints every {text!r}: give steps, as 500, or a time, as 90s, 10m or 2h")
    steps, number, unit = found.groups()
    return (int(steps), 0.0) if steps else (0, float(number) * _UNITS_S[unit])


class CheckpointSchedule:
    """The time of the next automatic checkpoint.

    Args:
        policy: the user's.
        version: committed steps of all models at the start.
        now: the time, in seconds.
    """

    def __init__(self, policy: CheckpointPolicy, version: int, now: float) -> None:
        self._policy = policy
        self._version = version
        self._written_s = now
        self._not_before_s = now
        self._retry_s = FIRST_RETRY_S

    def should_write(self, version: int, now: float) -> bool:
        """Return True if a checkpoint is due at this sum of the models' versions and this time; see also `may_try`."""
        if version == self._version:
            return False
        steps, seconds = self._policy.every_steps, self._policy.every_s
        return bool(steps and version - self._version >= steps) or bool(seconds and now - self._written_s >= seconds)

    def may_try(self, now: float) -> bool:
        """Return True if the pause after a failure is over."""
        return now >= self._not_before_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until `should_write` or `may_try` may change without a committed step; inf = never."""
        if self._not_before_s > now:
            return self._not_before_s - now
        next_s = self._written_s + self._policy.every_s if self._policy.every_s else math.inf
        return next_s - now if next_s > now else math.inf

    def next(self, version: int, now: float) -> str:
        """Return the time of the next checkpoint or try, as text; empty when none is written."""
        if not self.may_try(now):
            return f"trying again in {self._not_before_s - now:.0f} s"
        if self._policy.every_steps:
            return f"the next one is due in {max(0, self._version + self._policy.every_steps - version)} steps"
        if self._policy.every_s:
            return f"the next one is due in {max(0.0, self._written_s + self._policy.every_s - now):.0f} s"
        return ""

    def restart(self, version: int) -> None:
        """Count steps from this version: parameters were restored, or there are other models."""
        self._version = version

    def written(self, version: int, now: float) -> None:
        """Note that a checkpoint was written."""
        self._version, self._written_s, self._not_before_s, self._retry_s = version, now, now, FIRST_RETRY_S

    def failed(self, now: float) -> float:
        """Note that a checkpoint could not be written or restored; return the seconds until the next try."""
        retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LONGEST_RETRY_S)
        self._not_before_s = now + retry_s
        return retry_s


__all__ = ["CheckpointPolicy", "CheckpointSchedule", "parse_every"]
