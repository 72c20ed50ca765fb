"""Lion, which torch does not have: one moment, and steps of one size.

Owns: its hyperparameters and their meaning. Refuses: nothing beyond the ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from axon_ps.optim.base import AT_LEAST_0, BELOW_1, Range, UpdateRule
from axon_ps.optim.registry import register
from axon_ps.types import Array, Hyper


@register("lion")
class Lion(UpdateRule):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    c = beta1 · m + (1 - beta1) · g; p -= lr · (sign(c) + weight_decay · p); m = beta2 · m + (1 - beta2) · g.
    The paper advises a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times larger.
    """

    defaults: ClassVar[Mapping[str, float]] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    ranges: ClassVar[Mapping[str, Range]] = {
        "lr": AT_LEAST_0,
        "beta1": BELOW_1,
        "beta2": BELOW_1,
        "weight_decay": AT_LEAST_0,
    }

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return `exp_avg`, always."""
        return ("exp_avg",)

    def _update(
        self,
        param: Array,
        grad: Array,
        state: tuple[Array, ...],
        wire: Array | None,
        hyper: Hyper,
        update: int,
        grad_scale: float,
        digests: Array | None = None,
    ) -> None:
        lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
        self._kernels.lion(
            param,
            grad,
            state[0],
            wire,
            digests,
            grad_scale,
            1.0 - lr * hyper["weight_decay"],
            lr,
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
        )
