"""The optimizer's groups in a checkpoint, with all their keys. The caller does not see this part of its `extra`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from axon_ps.errors import CheckpointCorrupt
from axon_ps.parallel.checkpoints import own_state
from axon_ps.parallel.counterpart import as_in_torch
from axon_ps.worker.checkpoints import CheckpointInfo

_GROUPS: Final = "axon_ps.param_groups"
"""The key of the groups in a checkpoint's `extra`."""


def with_groups(extra: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the `extra` of a checkpoint: the caller's own part, and the groups of the optimizer."""
    given = dict(extra or {})
    if optimizer is not None:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        given[_GROUPS] = own_state.plain(groups)
    return given


def set_groups(optimizer: torch.optim.Optimizer, info: CheckpointInfo) -> None:
    """Set an optimizer's groups from a checkpoint: all keys, or the hyperparameters of its newest step.

    Raises:
        CheckpointCorrupt: the groups in it are damaged.
    """
    saved = own_state.from_plain(info.extra.get(_GROUPS))
    if saved is not None and not (isinstance(saved, list) and all(isinstance(values, dict) for values in saved)):
        raise CheckpointCorrupt(f"the parameter groups in {info.uri} are damaged: they are no list of objects")
    if saved is None:
        known = info.optimizer == type(optimizer).__name__.lower() or info.optimizer == getattr(optimizer, "rule", "")
        saved = [as_in_torch(hyper) for hyper in info.hyper] if known else []
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        warnings.warn(
            f"the checkpoint {info.uri} has values of {len(saved)} parameter groups of this optimizer, which has "
            f"{len(groups)}: they stay as they are",
            stacklevel=3,
        )
        return
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if key in ("params", "param_names") or (value is None and group.get(key) is not None):
                continue
            now = group.get(key)
            group[key] = torch.full_like(now, value) if isinstance(now, torch.Tensor) else value


def of_caller(info: CheckpointInfo) -> CheckpointInfo:
    """Return the info with the caller's own part of `extra`."""
    return replace(info, extra={key: value for key, value in info.extra.items() if key != _GROUPS})
