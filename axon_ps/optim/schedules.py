"""Learning rate schedules as functions of the version: factors that the base learning rate is multiplied by.

Owns: the shapes most runs use. Refuses: state. The factor depends on the version alone, so a run that resumes from a
checkpoint, or repeats an aborted step, computes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from axon_ps.errors import InvalidRequest

Schedule = Callable[[int], float]
"""version (committed steps so far, from 0) → factor for the learning rate of the next update."""


def constant(factor: float = 1.0) -> Schedule:
    """The same factor at every version."""
    return lambda version: factor


def linear(start: float, end: float, versions: int) -> Schedule:
    """From `start` at version 0 straight to `end` at version `versions`, and `end` from then on.

    As `torch.optim.lr_scheduler.LinearLR(start_factor=start, end_factor=end, total_iters=versions)`.

    Raises:
        InvalidRequest: `versions` is negative.
    """
    _check("versions", versions, 0)
    return lambda version: end if version >= versions else start + (end - start) * version / versions


def cosine_with_warmup(versions: int, *, warmup_versions: int = 0, start: float = 0.0, end: float = 0.0) -> Schedule:
    """From `start` straight to 1 at version `warmup_versions`, then half a cosine down to `end` at version `versions`.

    As torch's `LinearLR` for the warm-up, followed by `CosineAnnealingLR` (Loshchilov & Hutter 2017, without restarts);
    `end` from then on.

    Args:
        versions: length of the whole schedule, warm-up included.
        warmup_versions: length of the warm-up.
        start: factor at version 0, if there is a warm-up.
        end: factor at the end.

    Raises:
        InvalidRequest: `warmup_versions` is negative, or `versions` is less than it.
    """
    _check("warmup_versions", warmup_versions, 0)
    _check("versions", versions, warmup_versions)
    warmup = linear(start, 1.0, warmup_versions)

    def schedule(version: int) -> float:
        if version < warmup_versions:
            return warmup(version)
        if version >= versions:
            return end
        done = (version - warmup_versions) / (versions - warmup_versions)
        return end + (1.0 - end) * (1.0 + math.cos(math.pi * done)) / 2.0

    return schedule


def _check(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequest(f"{name} is {value}; needed is a number of versions ≥ {low}")
