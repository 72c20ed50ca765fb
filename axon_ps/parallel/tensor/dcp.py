"""State dicts of tensor-parallel models for torch.distributed.checkpoint: this rank's shards as DTensors.

DCP writes each shard once and loads on any number of ranks. It needs torch.distributed (`init_process_group("axon")`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.tensor.optimizer_state import named_optimizer_state
from axon_ps.parallel.tensor.state import sharded_parameters


def distributed_state_dict(
    module: nn.Module, device_mesh: DeviceMesh, state: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the model's state dict with sharded parameters as DTensors, which share the module's memory.

    Nothing is sent. `dcp.save` of the result writes the full tensors. `dcp.load` of it fills the module in place, at
    any size of the tensor group.

    Args:
        module: the model.
        device_mesh: one axis, the ranks of the layers' groups: `mesh.device_mesh()["tensor"]`.
        state: a state dict with the shards, under the names of `module`; None = its own.

    Raises:
        InvalidRequest: the device mesh has other ranks than a layer's group.
    """
    wrap = _Wrap(module, device_mesh)
    return {key: wrap(key, value) for key, value in (module.state_dict() if state is None else state).items()}


def distributed_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, device_mesh: DeviceMesh
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names, with sharded values as DTensors, which share its memory.

    An optimizer that is to be filled by `dcp.load` must have its state: take a step with zero gradients first.

    Args:
        module: the model whose parameters it has.
        optimizer: made of the parameters that the model has now.
        device_mesh: as for `distributed_state_dict`.

    Raises:
        InvalidRequest: as there, or the optimizer has a parameter that the model does not have.
    """
    return named_optimizer_state(module, optimizer, _Wrap(module, device_mesh))


class _Wrap:
    """The function that makes DTensors of the shards of sharded parameters, and returns other values as they are."""

    def __init__(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh
        self._sharded = sharded_parameters(module)
        ranks = tuple(device_mesh.mesh.reshape(-1).tolist())
        for full, (layer, _) in self._sharded.items():
            if device_mesh.ndim != 1 or ranks != layer.group.ranks:
                raise InvalidRequest(
                    f"the device mesh has {device_mesh.ndim} axes with the ranks {ranks}; {full!r} is sharded among "
                    f'the ranks {layer.group.ranks}: give the axis of the tensor group, mesh.device_mesh()["tensor"]'
                )

    def __call__(self, full: str, value: Any) -> Any:
        if full not in self._sharded:
            return value
        from torch.distributed.tensor import DTensor, Shard  # half a second, which few programs need

        layer, name = self._sharded[full]
        partition = layer.partitions[name]
        full_tensor = torch.empty(partition.full_shape(value.shape), dtype=value.dtype, device="meta")
        return DTensor.from_local(
            value.detach(),
            self._device_mesh,
            [Shard(partition.dim)],
            run_check=False,
            shape=full_tensor.shape,
            stride=full_tensor.stride(),
        )
