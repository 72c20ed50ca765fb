"""Our counterparts of torch's optimizers."""

from __future__ import annotations

from typing import Any, Final

import torch

from axon_ps.errors import InvalidRequest
from axon_ps.optim import registry
from axon_ps.types import Hyper

_FLAGS: Final = ("amsgrad", "maximize", "differentiable")


def counterpart(optimizer: torch.optim.Optimizer, otherwise: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the name and the groups' hyperparameters of our optimizer that is the counterpart of one of torch's.

    Args:
        optimizer: torch's SGD, Adam, AdamW, Adagrad or RMSprop, or a subclass by one of these names.
        otherwise: the alternative that the error suggests.

    Raises:
        InvalidRequest: there is no such optimizer.
    """
    name = type(optimizer).__name__.lower()
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if name == "adam" and True in decoupled:
        if len(decoupled) > 1:
            raise InvalidRequest(
                f"this Adam decouples weight decay in some of its groups only, which shard servers do not; {otherwise}"
            )
        name = "adamw"
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


def as_in_torch(values: Hyper) -> dict[str, Any]:
    """Rename our hyperparameters to torch's: beta1 and beta2 become the pair `betas`, which schedulers read."""
    if "beta1" not in values or "beta2" not in values:
        return dict(values)
    others = {name: value for name, value in values.items() if name not in ("beta1", "beta2")}
    return {**others, "betas": (values["beta1"], values["beta2"])}


__all__ = ["as_in_torch", "counterpart"]
