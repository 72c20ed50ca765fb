"""Adam and AdamW, as `torch.optim.Adam` and `torch.optim.AdamW`. One loop serves both.

Owns: their hyperparameters, the meaning of these, and the bias corrections. Refuses: nothing beyond the ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from axon_ps.optim.base import AT_LEAST_0, BELOW_1, FLAG, Range, UpdateRule
from axon_ps.optim.registry import register
from axon_ps.types import Array, Hyper


@register("adam")
class Adam(UpdateRule):
    """Adam (Kingma & Ba 2015), with weight decay as an L2 term of the gradient, in torch's form.

    g += weight_decay · p; m, v = averages of g and g² with beta1 and beta2;
    p -= lr / (1 - beta1^t) · m / (√v / √(1 - beta2^t) + eps). With amsgrad (Reddi et al. 2018) v is its own maximum.
    """

    defaults: ClassVar[Mapping[str, float]] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": 0.0,
        "maximize": 0.0,
    }
    ranges: ClassVar[Mapping[str, Range]] = {
        "lr": AT_LEAST_0,
        "beta1": BELOW_1,
        "beta2": BELOW_1,
        "eps": AT_LEAST_0,
        "weight_decay": AT_LEAST_0,
        "amsgrad": FLAG,
        "maximize": FLAG,
    }
    decoupled: ClassVar[bool] = False
    """True if weight decay shrinks the parameter itself."""

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return `exp_avg` and `exp_avg_sq`, and `max_exp_avg_sq` if a group has amsgrad."""
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self._any("amsgrad", groups) else names

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
        lr, beta1, beta2, weight_decay = hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["weight_decay"]
        self._kernels.adam(
            param,
            grad,
            state[0],
            state[1],
            state[2] if hyper["amsgrad"] else None,
            wire,
            digests,
            -grad_scale if hyper["maximize"] else grad_scale,
            None if self.decoupled else weight_decay or None,
            1.0 - lr * weight_decay if self.decoupled else 1.0,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            (1.0 - beta2**update) ** 0.5,
            hyper["eps"],
            lr / (1.0 - beta1**update),
        )


@register("adamw")
class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019): p *= 1 - lr · weight_decay before Adam's step. The gradient does not change."""

    defaults: ClassVar[Mapping[str, float]] = {**Adam.defaults, "weight_decay": 1e-2}
    decoupled: ClassVar[bool] = True
