"""Stochastic gradient descent with momentum, as `torch.optim.SGD`.

Owns: SGD's hyperparameters and their meaning. Refuses: nesterov without momentum, or with dampening, as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from axon_ps.errors import InvalidRequest
from axon_ps.optim.base import ANY, AT_LEAST_0, FLAG, Range, UpdateRule
from axon_ps.optim.registry import register
from axon_ps.types import Array, Hyper


@register("sgd")
class SGD(UpdateRule):
    """p -= lr · b, where b = momentum · b + (1 - dampening) · g and g includes weight_decay · p.

    At the first update b is g, undampened. With nesterov the step is g + momentum · b. Source: Sutskever et al. 2013,
    in torch's form.
    """

    defaults: ClassVar[Mapping[str, float]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": 0.0,
        "maximize": 0.0,
    }
    ranges: ClassVar[Mapping[str, Range]] = {
        "lr": AT_LEAST_0,
        "momentum": AT_LEAST_0,
        "dampening": ANY,
        "weight_decay": AT_LEAST_0,
        "nesterov": FLAG,
        "maximize": FLAG,
    }

    def state_names(self, groups: Sequence[Hyper]) -> tuple[str, ...]:
        """Return `momentum_buffer` if a group has momentum."""
        return ("momentum_buffer",) if self._any("momentum", groups) else ()

    def validate(self, hyper: Hyper) -> dict[str, float]:
        """Check the hyperparameters of one group and fill in the defaults.

        Raises:
            InvalidRequest: a name is unknown, a value is out of its range, or nesterov is on without momentum or with
                dampening.
        """
        values = super().validate(hyper)
        if values["nesterov"] and (values["momentum"] == 0.0 or values["dampening"] != 0.0):
            raise InvalidRequest(
                f"sgd: nesterov is on with momentum {values['momentum']:g} and dampening {values['dampening']:g}; "
                f"it needs a momentum above 0 and a dampening of 0"
            )
        return values

    def cannot_follow(self, before: Hyper, hyper: Hyper) -> str:
        """Refuse to switch momentum on with dampening: torch applies no dampening in the first step of a buffer."""
        if not (hyper["momentum"] and hyper["dampening"] and not before["momentum"]):
            return ""
        return (
            f"sgd: momentum goes from 0 to {hyper['momentum']:g} with a dampening of {hyper['dampening']:g}; torch "
            "does not dampen the step in which a buffer begins, and the servers do: set dampening to 0, or give the "
            "group its momentum from the first step on"
        )

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
        momentum, first = hyper["momentum"], update == 1
        self._kernels.sgd(
            param,
            grad,
            state[0] if momentum else None,
            wire,
            digests,
            -grad_scale if hyper["maximize"] else grad_scale,
            hyper["weight_decay"] or None,
            hyper["lr"],
            0.0 if first else momentum,
            1.0 if first else 1.0 - hyper["dampening"],
            momentum if hyper["nesterov"] else None,
        )
