"""Optimizer state of models with tensor-parallel layers: full from the shards, and the shards from the full.

A full state is keyed by parameter names, like that of `torch.distributed.checkpoint`'s `get_optimizer_state_dict`:
{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{"params": [names], "lr": ..., ...}]}. Values of the shape of
their parameter are sharded like it. All others (counts of steps) are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.parallel.tensor.state import sharded_parameters


def full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, cpu: bool = True
) -> dict[str, Any]:
    """Return the full state of a torch optimizer, on every rank. Collective over the layers' groups.

    Args:
        module: the model whose parameters it has.
        optimizer: made of the parameters that the model has now.
        cpu: move full tensors to the host, one entry after the other.

    Raises:
        InvalidRequest: the optimizer has a parameter that the model does not have.

    After an error: nothing was changed.
    """
    sharded = sharded_parameters(module)

    def full_tensor(full: str, value: torch.Tensor) -> torch.Tensor:
        if full in sharded:
            layer, name = sharded[full]
            value = layer.full_tensor(name, value)
        return value.to("cpu") if cpu else value

    return named_optimizer_state(module, optimizer, full_tensor)


def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a full state: every rank takes its shards. Nothing is sent.

    Args:
        module: the model whose parameters it has.
        optimizer: has as many parameter groups as the saved one, of the same parameters in any order.
        state: as `full_optimizer_state_dict` returns it, at any size of the groups.

    Raises:
        InvalidRequest: the optimizer has a parameter that the model does not have.
        LayoutMismatch: the state is of other parameters, or of other shapes. Nothing was loaded.
    """
    sharded = sharded_parameters(module)
    names = _names(module, optimizer)
    groups, given = optimizer.state_dict()["param_groups"], state["param_groups"]
    if [sorted(group["params"]) for group in given] != [sorted(group) for group in names]:
        raise LayoutMismatch("the state's parameter groups are of other parameters than the optimizer's")
    order = [name for group in names for name in group]
    loaded: dict[int, dict[str, Any]] = {}
    for index, full in enumerate(order):
        if full not in state["state"]:
            continue
        loaded[index] = {}
        for key, value in state["state"][full].items():
            if full in sharded and isinstance(value, torch.Tensor) and value.dim():
                layer, name = sharded[full]
                value = layer.checked_shard_of(name, value, f"{key} of {full!r}")
            # The optimizer gets a copy, since it updates its state in place.
            loaded[index][key] = value.clone() if isinstance(value, torch.Tensor) else value
    new_groups = [{**theirs, "params": ours["params"]} for ours, theirs in zip(groups, given, strict=True)]
    optimizer.load_state_dict({"state": loaded, "param_groups": new_groups})


def named_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, convert: Callable[[str, torch.Tensor], Any]
) -> dict[str, Any]:
    """Return this rank's optimizer state by names, with `convert(name, value)` for all values of a parameter's shape.

    Raises:
        InvalidRequest: the optimizer has a parameter that the model does not have.
    """
    names = _names(module, optimizer)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group, own in zip(optimizer.param_groups, names, strict=True):
        groups.append({**group, "params": own})
        for parameter, full in zip(group["params"], own, strict=True):
            if parameter in optimizer.state:
                state[full] = {
                    key: convert(full, value) if _is_like(value, parameter) else value
                    for key, value in optimizer.state[parameter].items()
                }
    return {"state": state, "param_groups": groups}


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of each parameter group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if not all(name for group in groups for name in group):
        raise InvalidRequest("the optimizer has a parameter that the model has not; give the model it was made for")
    return groups
