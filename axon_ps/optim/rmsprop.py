"""RMSprop, as `torch.optim.RMSprop`.

Owns: its hyperparameters and their meaning. Refuses: nothing beyond the ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from axon_ps.optim.base import AT_LEAST_0, FLAG, Range, UpdateRule
from axon_ps.optim.registry import register
from axon_ps.types import Array, Hyper


@register("rmsprop")
class RMSprop(UpdateRule):
    """RMSprop (Hinton 2012; centered: Graves 2013), in torch's form.

    g += weight_decay · p; s = average of g² with alpha, minus the square of the average of g when centered;
    d = g / (√s + eps); p -= lr · d, or with momentum b = momentum · b + d, p -= lr · b.
    """

    defaults: ClassVar[Mapping[str, float]] = {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": 0.0,
        "maximize": 0.0,
    }
    ranges: ClassVar[Mapping[str, Range]] = {
        "lr": AT_LEAST_0,
        "alpha": AT_LEAST_0,
        "eps": AT_LEAST_0,
        "weight_decay": AT_LEAST_0,
        "momentum": AT_LEAST_0,
        "centered": FLAG,
        "maximize": FLAG,
    }

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return `square_avg`, then `momentum_buffer` if a group has momentum, then `grad_avg` if one is centered."""
        momentum = ("momentum_buffer",) if self._any("momentum", groups) else ()
        centered = ("grad_avg",) if self._any("centered", groups) else ()
        return ("square_avg", *momentum, *centered)

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
        alpha, momentum = hyper["alpha"], hyper["momentum"]
        self._kernels.rmsprop(
            param,
            grad,
            state[0],
            state[1] if momentum else None,  # `momentum_buffer` is second if any group has it
            state[-1] if hyper["centered"] else None,  # `grad_avg` is last if any group has it
            wire,
            digests,
            -grad_scale if hyper["maximize"] else grad_scale,
            hyper["weight_decay"] or None,
            hyper["lr"],
            alpha,
            1.0 - alpha,
            momentum,
            hyper["eps"],
        )
