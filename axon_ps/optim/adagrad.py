"""Adagrad, as `torch.optim.Adagrad`.

Owns: its hyperparameters and their meaning. Refuses: different initial accumulators in different groups, because a
state array is filled once, before it is known which element belongs to which group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from axon_ps.errors import InvalidRequest
from axon_ps.optim.base import AT_LEAST_0, FLAG, Range, UpdateRule
from axon_ps.optim.registry import register
from axon_ps.types import Array, Hyper


@register("adagrad")
class Adagrad(UpdateRule):
    """Adagrad (Duchi et al. 2011), in torch's form.

    g += weight_decay · p; sum += g²; p -= lr / (1 + (t - 1) · lr_decay) · g / (√sum + eps).
    """

    defaults: ClassVar[Mapping[str, float]] = {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "maximize": 0.0,
    }
    ranges: ClassVar[Mapping[str, Range]] = {
        "lr": AT_LEAST_0,
        "lr_decay": AT_LEAST_0,
        "weight_decay": AT_LEAST_0,
        "initial_accumulator_value": AT_LEAST_0,
        "eps": AT_LEAST_0,
        "maximize": FLAG,
    }

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return `sum`, always."""
        return ("sum",)

    def initial_state(self, name: str, groups: Sequence[Hyper]) -> float:
        """Return `initial_accumulator_value` for `sum`.

        Raises:
            InvalidRequest: there is no such state array, or the groups ask for different values.
        """
        super().initial_state(name, groups)
        option = "initial_accumulator_value"
        values = {float(group.get(option, self.defaults[option])) for group in groups} or {self.defaults[option]}
        if len(values) > 1:
            raise InvalidRequest(
                f"adagrad: {option} is {', '.join(f'{v:g}' for v in sorted(values))} in different groups; "
                f"it must be the same in all; set it once"
            )
        return values.pop()

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
        self._kernels.adagrad(
            param,
            grad,
            state[0],
            wire,
            digests,
            -grad_scale if hyper["maximize"] else grad_scale,
            hyper["weight_decay"] or None,
            hyper["lr"] / (1.0 + (update - 1) * hyper["lr_decay"]),
            hyper["eps"],
        )
