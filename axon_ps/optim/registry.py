"""Optimizers by name, as jobs register them.

Owns: the list of names. Refuses: names it does not know, with the list. Nothing here imports numba, so a coordinator or
a worker can check a job's optimizer without it.
"""

from __future__ import annotations

from axon_ps.errors import InvalidRequest
from axon_ps.optim.adagrad import Adagrad
from axon_ps.optim.adam import Adam, AdamW
from axon_ps.optim.base import ServerOptimizer
from axon_ps.optim.lion import Lion
from axon_ps.optim.rmsprop import RMSprop
from axon_ps.optim.sgd import SGD

_CLASSES: dict[str, type[ServerOptimizer]] = {
    optimizer.name: optimizer for optimizer in (SGD, Adam, AdamW, Adagrad, RMSprop, Lion)
}


def names() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(_CLASSES)


def create(name: str) -> ServerOptimizer:
    """The optimizer called `name`.

    Args:
        name: "sgd", "adam", "adamw", "adagrad", "rmsprop" or "lion".

    Raises:
        InvalidRequest: no optimizer has that name.
    """
    if name not in _CLASSES:
        raise InvalidRequest(f"optimizer {name!r} is unknown; use one of {', '.join(_CLASSES)}")
    return _CLASSES[name]()
