"""Float8 all-gather as torchao asks for it, and the parameters that travel as float8.

torchao's `convert_to_float8_training` with `enable_fsdp_float8_all_gather` gives linear layers weights of a tensor
class of its own, which FSDP2 sends as float8. Here the shard servers make the float8 numbers and scales of new values
(`compress.float8`), so these weights become plain parameters. The layers then quantise the values that arrive, and get
the numbers that were sent. `precompute_float8_dynamic_scale_for_fsdp` finds nothing to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from axon_ps.parallel.fsdp.wrap import WrappedUnit
from axon_ps.parallel.precision import MixedPrecision

_TORCHAOS: Final = "WeightWithDynamicFloat8CastTensor"


def make_plain(module: nn.Module) -> None:
    """Replace torchao's weights in a module by plain parameters with the same values. Tied ones stay tied."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for key, param in child._parameters.items():
            if param is not None and type(param).__name__ == _TORCHAOS:
                values: Any = param
                made = nn.Parameter(values._tensor, requires_grad=param.requires_grad)
                child._parameters[key] = plain.setdefault(param, made)


def precision_for(module: nn.Module, given: MixedPrecision) -> MixedPrecision:
    """Return the precision of a model: `given`, with float8 from the servers if layers ask for it and nothing else is
    given."""
    configs = (getattr(child, "config", None) for child in module.modules())
    if given.wire_dtype is not None or not any(getattr(c, "enable_fsdp_float8_all_gather", False) for c in configs):
        return given
    return dataclasses.replace(given, wire_dtype="float8_e4m3")


def marked(module: nn.Module, wrapped_units: Sequence[WrappedUnit]) -> tuple[WrappedUnit, ...]:
    """Mark the parameters that travel as float8: weights of linear layers that have no other use.

    The layers are those that torchao converted. If there are none, they are `nn.Linear` and its subclasses.
    """
    layers = {child for child in module.modules() if hasattr(getattr(child, "config", None), "cast_config_weight")}
    layers = layers or {child for child in module.modules() if isinstance(child, nn.Linear)}
    linear, others = set[nn.Parameter](), set[nn.Parameter]()
    for child in module.modules():
        for key, param in child._parameters.items():
            if param is not None:
                is_number = param.is_floating_point() and param.dtype.itemsize > 1
                (linear if child in layers and key == "weight" and is_number else others).add(param)
    made = []
    for wrapped in wrapped_units:
        parameters = tuple(
            dataclasses.replace(p, float8=param in linear - others)
            for p, param in zip(wrapped.unit.parameters, wrapped.params, strict=True)
        )
        made.append(dataclasses.replace(wrapped, unit=dataclasses.replace(wrapped.unit, parameters=parameters)))
    return tuple(made)
