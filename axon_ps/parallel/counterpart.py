"""Which optimizer of ours does what one of torch's does."""

from __future__ import annotations

from typing import Any, Final

import torch

from axon_ps.errors import InvalidRequest
from axon_ps.optim import registry

_FLAGS: Final = ("amsgrad", "maximize")


def counterpart(optimizer: torch.optim.Optimizer, otherwise: str) -> tuple[str, list[dict[str, Any]]]:
    """The optimizer of ours that does what one of torch's does: its name, and its groups' hyperparameters.

    Args:
        optimizer: torch's SGD, Adam, AdamW, Adagrad or RMSprop, or a subclass by one of these names.
        otherwise: what else to do, for the error.

    Raises:
        InvalidRequest: there is none.
    """
    name = type(optimizer).__name__.lower()
    if name not in registry.names():
        raise InvalidRequest(
            f"{type(optimizer).__name__} has no form on shard servers; use one of "
            f"{', '.join(registry.names())}, or {otherwise}"
        )
    known = {*registry.create(name).defaults, "betas"}
    flags = [f for f in _FLAGS if f not in known and any(group.get(f) for group in optimizer.param_groups)]
    if flags:
        raise InvalidRequest(f"{name} with {flags[0]}=True has no form on shard servers; leave it out, or {otherwise}")
    return name, [{k: v for k, v in group.items() if k in known} for group in optimizer.param_groups]


__all__ = ["counterpart"]
