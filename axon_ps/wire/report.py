"""A training script's report of its progress, in the job's store. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from axon_ps.texts import printable, value_of_json

REPORT_KEY: Final = "axon_ps/progress"
"""Key of the newest report in the store, a JSON object; see `worker.progress`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        step: the script's current step.
        steps: the total number of steps; None = not reported.
        loss: the loss; None = not reported.
        steps_per_s: the rate measured by the script's worker; 0 = unknown.
        values: further numbers, by name.
        at: its time, in seconds since 1970; 0 = unknown.
        by_version: whether `step` is the version of the parameters, since the script has not given another.
    """

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    steps_per_s: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0
    by_version: bool = False

    def at_version(self, version: int, run_began: int, steps_per_s: float) -> Report:
        """Return the current report: a report by version gets the current step, and the job's rate.

        `steps` may count all runs of the job, or this run alone. It is taken as this run's if it cannot be of all runs:
        the job had as many steps before this run, or has more now. If the number is exceeded nevertheless it is left
        out, because it counts something else.

        Args:
            version: the version of the first model.
            run_began: its version when this run of the workers began.
            steps_per_s: the job's rate.
        """
        report = self
        if self.by_version:
            of_this_run = self.steps is not None and self.steps <= max(run_began, version - 1)
            step = version - run_began if of_this_run else version
            report = dataclasses.replace(self, step=step, steps_per_s=steps_per_s)
        exceeded = report.steps is not None and report.step > report.steps
        return dataclasses.replace(report, steps=None) if exceeded else report

    def left_s(self, now: float) -> float | None:
        """Return the time that the rest takes at the current rate, in seconds; None = unknown.

        Args:
            now: the time, in seconds since 1970.
        """
        if self.steps is None or self.step >= self.steps or self.steps_per_s <= 0:
            return None
        since_s = now - self.at if self.at and not self.by_version else 0.0
        left_s = (self.steps - self.step) / self.steps_per_s - since_s
        return left_s if left_s > 0 else None


def parse(value: bytes | None) -> Report | None:
    """Parse the stored report; None if the value is missing or not a report."""
    try:
        found = value_of_json(value or b"", "a report")
        return Report(
            step=int(found.get("step") or 0),
            steps=None if found.get("steps") is None else int(found["steps"]),
            loss=None if found.get("loss") is None else float(found["loss"]),
            steps_per_s=_finite(found.get("steps_per_s")),
            values={printable(str(name)): float(number) for name, number in (found.get("values") or {}).items()},
            at=_finite(found.get("at")),
            by_version=bool(found.get("by_version")),
        )
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None


def _finite(number: object) -> float:
    value = float(number or 0.0)  # type: ignore[arg-type]
    return value if math.isfinite(value) else 0.0
