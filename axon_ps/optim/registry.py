"""Optimizers by name, as jobs register them.

Owns: the names. Nothing here imports numba, so a coordinator or a worker can check a job's optimizer without it.
"""

from __future__ import annotations

from axon_ps.optim.base import UpdateRule
from axon_ps.plugins import Registry

_REGISTRY: Registry[UpdateRule] = Registry("optimizer")

register = _REGISTRY.register
names = _REGISTRY.names


def create(name: str) -> UpdateRule:
    """The optimizer called `name`.

    Args:
        name: "sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", or what a plugin has registered.

    Raises:
        InvalidRequest: no optimizer has that name.
    """
    return _REGISTRY.find(name)()
