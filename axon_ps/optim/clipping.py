"""Clipping by the global norm, in two pure functions: servers report sums of squares, the coordinator divides.

Owns: torch's formula. Refuses: the handling of a norm that is not finite. The result is then inf or NaN, and the
coordinator checks it when it decides the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from axon_ps.errors import InvalidRequest

_EPS = 1e-6
"""The number that torch adds to the norm."""


def global_norm(sums_of_squares: Iterable[float]) -> float:
    """Return the L2 norm of a gradient, from the sums of squares of its slices.

    The sum is exactly rounded (`math.fsum`), so the order in which servers reported does not matter.

    Args:
        sums_of_squares: per slice, the sum of the squares of its elements, f64.

    Returns:
        The square root of their sum; inf or NaN when a slice was not finite, 0.0 without slices.
    """
    return math.sqrt(math.fsum(sums_of_squares))


def clip_factor(total_norm: float, max_norm: float) -> float:
    """Return the factor for every gradient that makes the global norm at most `max_norm`.

    It is min(1, max_norm / (total_norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`.

    Args:
        total_norm: the global norm before clipping; inf gives 0, NaN gives NaN, unless `max_norm` is inf.
        max_norm: the largest norm wanted; inf for no clipping: a factor of 1.

    Raises:
        InvalidRequest: `max_norm` is negative or NaN.
    """
    if not max_norm >= 0.0:
        raise InvalidRequest(f"max_norm is {max_norm}; needed is a norm ≥ 0; use inf to measure without clipping")
    if math.isinf(max_norm):
        return 1.0
    factor = max_norm / (total_norm + _EPS)
    return 1.0 if factor > 1.0 else factor
