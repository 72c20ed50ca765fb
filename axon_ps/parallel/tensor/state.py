"""State dicts of models with tensor-parallel layers: whole ones from the parts, and the parts from whole ones.

`state_dict()` of such a model has this rank's parts: quick to save and load while the group stays as large. A whole
state dict has the keys and shapes that the model has on one rank (a plain model's, if its layers have the same names),
so it loads at any size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from axon_ps.errors import LayoutMismatch
from axon_ps.parallel.tensor.module import TensorParallelModule


def split_parameters(module: nn.Module) -> Iterator[tuple[str, TensorParallelModule, str]]:
    """Every parameter that is split: its name in `module`, the layer that has it, and its name there."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, TensorParallelModule):
            for name in child.partitions:
                yield f"{prefix}.{name}" if prefix else name, child, name


def full_state_dict(module: nn.Module, state: Mapping[str, Any] | None = None, *, cpu: bool = True) -> dict[str, Any]:
    """The whole state dict of a model with tensor-parallel layers, on every rank. Collective over the layers' groups.

    Args:
        module: the model.
        state: a state dict with the parts, under the names of `module`: what a wrapper of it gives; None = its own.
        cpu: move what is whole to the host, one entry after the other; if not, everything stays where it is.

    Returns:
        Name -> tensor, in the order of the state dict; tensors that are not split share the module's memory.

    After an error: the module is as it was.
    """
    split = {full: (layer, name) for full, layer, name in split_parameters(module)}
    result: dict[str, Any] = {}
    for key, value in (module.state_dict() if state is None else state).items():
        if key in split:
            layer, name = split[key]
            value = layer.whole(name, value)
        result[key] = value.to("cpu") if cpu and isinstance(value, torch.Tensor) else value
    return result


def local_state_dict(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state dict, for the `load_state_dict` of the model or of a wrapper of it.

    Args:
        module: the model; says what is split.
        state: the whole state dict, under the names of `module`.

    Raises:
        LayoutMismatch: a tensor that is split has another shape than the model's.
    """
    result = dict(state)
    for full, layer, name in split_parameters(module):
        if full not in result:
            continue
        needed = layer.partitions[name].whole_shape(layer.get_parameter(name).shape)
        given = tuple(result[full].shape)
        if given != needed:
            raise LayoutMismatch(f"{full!r} of the state dict is {list(given)}; the whole one has {list(needed)}")
        result[full] = layer.part(name, result[full])
    return result


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict: every rank takes its parts. Nothing is sent.

    Args:
        module: the model.
        state: as `full_state_dict` gives it, at any size of the group.
        strict: refuse missing and unknown names, as `load_state_dict` does.

    Raises:
        LayoutMismatch: a tensor that is split has another shape than the model's; nothing was loaded.
        RuntimeError: as `load_state_dict` raises it.
    """
    module.load_state_dict(local_state_dict(module, state), strict=strict)
