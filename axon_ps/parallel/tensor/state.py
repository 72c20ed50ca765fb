"""State dicts of models with tensor-parallel layers: full ones from the shards, and the shards from full ones.

`state_dict()` of such a model has this rank's shards: quick to save and load while the group stays as large. A full
state dict has the keys and shapes that the model has on one rank (a plain model's, if its layers have the same names),
so it loads at any size of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from axon_ps.parallel.tensor.module import TensorParallelModule


def sharded_parameters(module: nn.Module) -> dict[str, tuple[TensorParallelModule, str]]:
    """Return the sharded parameters by their names in `module`, each as its layer and its name in the layer."""
    return {
        f"{prefix}.{name}" if prefix else name: (child, name)
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, TensorParallelModule)
        for name in child.partitions
    }


def full_state_dict(module: nn.Module, state: Mapping[str, Any] | None = None, *, cpu: bool = True) -> dict[str, Any]:
    """Return the full state dict of a tensor-parallel model, on every rank. Collective over the layers' groups.

    Args:
        module: the model.
        state: a state dict with the shards, under the names of `module`, as of a wrapper of it; None = its own.
        cpu: True = move full tensors to the host, one entry after the other; False = leave them on their device.

    Returns:
        Name -> tensor, in the order of the state dict. Tensors that are not sharded share the module's memory, unless
        they are moved.

    After an error: the module is as it was.
    """
    sharded = sharded_parameters(module)
    result: dict[str, Any] = {}
    for key, value in (module.state_dict() if state is None else state).items():
        if key in sharded:
            layer, name = sharded[key]
            value = layer.full_tensor(name, value)
        result[key] = value.to("cpu") if cpu and isinstance(value, torch.Tensor) else value
    return result


def local_state_dict(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's shard of a full state dict, for the `load_state_dict` of the model or of a wrapper of it.

    Args:
        module: the model.
        state: the full state dict, under the names of `module`.

    Raises:
        LayoutMismatch: a tensor that is sharded has another shape than the model's.
    """
    result = dict(state)
    for full, (layer, name) in sharded_parameters(module).items():
        if full in result:
            result[full] = layer.checked_shard_of(name, result[full], f"{full!r} of the state dict")
    return result


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a full state dict: every rank takes its shards. Nothing is sent.

    Args:
        module: the model.
        state: as `full_state_dict` returns it, at any size of the group.
        strict: refuse missing and unknown names, as `load_state_dict` does.

    Raises:
        LayoutMismatch: a tensor that is sharded has another shape than the model's. Nothing was loaded.
        RuntimeError: as `load_state_dict` raises it.
    """
    module.load_state_dict(local_state_dict(module, state), strict=strict)
