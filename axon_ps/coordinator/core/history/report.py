"""What a training script reports of its progress, as it is in the job's store. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

REPORT_KEY: Final = "axon_ps/progress"
"""Key of the store under which the newest report is, a JSON object; see `worker.progress`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        step: how far the script is.
        steps: how many steps there will be; None = it does not say.
        loss: the loss; None = it does not say.
        steps_per_s: as measured by the script's worker; 0 = unknown.
        values: further numbers, by name.
        at: when it was made, in seconds since 1970; 0 = unknown.
    """

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    steps_per_s: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0

    def left_s(self, now: float) -> float | None:
        """How long the rest will take, if it goes on like this, in seconds; None = that cannot be known.

        Args:
            now: the time, in seconds since 1970.
        """
        if self.steps is None or self.step >= self.steps or self.steps_per_s <= 0:
            return None
        left_s = (self.steps - self.step) / self.steps_per_s - (now - self.at if self.at else 0.0)
        return left_s if left_s > 0 else None


def parse(value: bytes | None) -> Report | None:
    """The report that is stored; None if there is none, whatever is stored instead."""
    try:
        found = json.loads(value or b"")
        return Report(
            step=int(found.get("step") or 0),
            steps=None if found.get("steps") is None else int(found["steps"]),
            loss=None if found.get("loss") is None else float(found["loss"]),
            steps_per_s=_finite(found.get("steps_per_s")),
            values={str(name): float(number) for name, number in (found.get("values") or {}).items()},
            at=_finite(found.get("at")),
        )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _finite(number: object) -> float:
    value = float(number or 0.0)  # type: ignore[arg-type]
    return value if math.isfinite(value) else 0.0
