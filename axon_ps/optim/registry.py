"""Optimizers by name, as jobs register them.

Owns: the names. Nothing here imports numba, so a coordinator or a worker can check a job's optimizer without it.
"""

from __future__ import annotations

from axon_ps.optim.base import UpdateRule
from axon_ps.plugins import Registry
from axon_ps.types import OptimizerSpec

_REGISTRY: Registry[UpdateRule] = Registry("optimizer")

register = _REGISTRY.register
names = _REGISTRY.names


def create(name: str) -> UpdateRule:
    """Return the optimizer called `name`.

    Args:
        name: "sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", or the name of a plugin's optimizer.

    Raises:
        InvalidRequest: no optimizer has that name.
    """
    return _REGISTRY.find(name)()


def initial_states(spec: OptimizerSpec | None) -> dict[str, float]:
    """Return the moments of an optimizer, each with its value before the first update; none without an optimizer.

    Raises:
        InvalidRequest: no optimizer has its name, or a hyperparameter is unknown or out of range.
    """
    if spec is None:
        return {}
    rule = create(spec.name)
    groups = tuple(rule.validate(group) for group in (*spec.groups, *spec.moments))
    return {name: rule.initial_state(name, groups) for name in rule.state_names(groups)}
