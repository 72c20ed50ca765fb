"""How a model is wrapped, and which parameters form which unit: from a module tree to a `Layout`.

The unit of a parameter is the innermost module around it that is a unit; what is in none belongs to the root. A
parameter that is reachable from two units (tied weights) belongs to the root, which is unsharded during all of forward
and backward. Frozen and trainable parameters of a module become two units of the layout, so that gradients and moments
exist only for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.dtypes import TORCH_DTYPES, MixedPrecision, dtype_from_torch
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.stats import Counters
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, Parameter, Unit
from axon_ps.types import DType

ROOT = "(root)"


@dataclass(frozen=True, kw_only=True)
class WrappedUnit:
    """One unit of the layout, and the parameters that it is made of.

    Attributes:
        owner: name of the module it belongs to; "" for the root.
        unit: its layout.
        params: the parameters, in layout order.
    """

    owner: str
    unit: Unit
    params: tuple[nn.Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """How a model is wrapped.

    Attributes:
        group: the workers that train it.
        strategy: which parameters stay on a worker.
        offload: what is in host memory.
        precision: dtypes of compute and wire.
        spec: what the model is registered with.
        name: what the job calls it.
        device: where parameters compute.
        built: the dtype that the model was built in.
        node_size: workers of a node.
        prefetch: gather units before they are needed.
        meter: counts the bytes of parameters.
        counters: those of `statistics()`.
    """

    group: ProcessGroup
    strategy: ShardingStrategy
    offload: CPUOffload
    precision: MixedPrecision
    spec: JobSpec
    name: str
    device: torch.device
    built: torch.dtype
    node_size: int
    prefetch: bool
    meter: Meter = field(default_factory=Meter)
    counters: Counters = field(default_factory=Counters)

    def compute_of(self, unit: Unit) -> torch.dtype:
        """What the parameters of a unit compute in."""
        return self.precision.compute(TORCH_DTYPES[unit.parameters[0].dtype])

    def wire_of(self, compute: torch.dtype) -> DType:
        """What is gathered as: the job's wire dtype, or what is computed in where that is decompressed."""
        wire = self.spec.precision
        return wire.param if wire.param_compression is None else dtype_from_torch(compute, "param_dtype")

    @property
    def replicated(self) -> bool:
        """Whether every worker has all of the model."""
        return self.strategy is ShardingStrategy.NO_SHARD

    @property
    def on_device(self) -> bool:
        """Whether parameters compute on a GPU."""
        return cuda.memory().is_device(self.device)


def partition(
    module: nn.Module, is_unit: Callable[[nn.Module], bool], ignored: Collection[nn.Parameter] = ()
) -> tuple[WrappedUnit, ...]:
    """Divide a module into units, the root first, the others in module order; `ignored` parameters are in none.

    Raises:
        InvalidRequest: there is no parameter, or one of a dtype or kind that cannot be sharded.
    """
    owners = [""] + [name for name, child in module.named_modules() if name and is_unit(child)]
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if not any(param is other for other in ignored):
            names.setdefault(param, []).append(name)
    if not names:
        raise InvalidRequest("the module has no parameters (beside those to be ignored); there is nothing to shard")
    members: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for param, aliases in names.items():
        found = {_owner(name, owners) for name in aliases}
        owner = found.pop() if len(found) == 1 else ""
        members.setdefault((owner, param.requires_grad), []).append(param)
    wrapped_units = []
    for owner in owners:
        for trainable in (True, False):
            params = members.get((owner, trainable))
            if params:
                name = (owner or ROOT) + ("" if trainable else " (frozen)")
                wrapped_units.append(
                    WrappedUnit(owner=owner, unit=_unit(name, params, names, trainable), params=tuple(params))
                )
    return tuple(wrapped_units)


def layout_of(wrapped_units: tuple[WrappedUnit, ...]) -> Layout:
    """The layout of these units."""
    return Layout(units=tuple(p.unit for p in wrapped_units))


def _owner(parameter_name: str, owners: list[str]) -> str:
    return max((o for o in owners if not o or parameter_name.startswith(o + ".")), key=len)


def _unit(name: str, params: list[nn.Parameter], names: dict[nn.Parameter, list[str]], trainable: bool) -> Unit:
    packed = []
    offset = 0
    for param in params:
        first, *aliases = names[param]
        if isinstance(param, nn.UninitializedParameter):
            raise InvalidRequest(f"parameter {first!r} has no shape yet; run a lazy module once before wrapping it")
        if param.layout != torch.strided:
            raise InvalidRequest(f"parameter {first!r} has layout {param.layout}; only dense parameters can be sharded")
        packed.append(
            Parameter(
                name=first,
                shape=tuple(param.shape),
                offset=offset,
                dtype=dtype_from_torch(param.dtype, f"parameter {first!r}"),
                aliases=tuple(aliases),
            )
        )
        offset += param.numel()
    dtypes = {p.dtype for p in packed}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(d.value for d in dtypes))
        raise InvalidRequest(
            f"unit {name!r} has parameters of several dtypes ({listed}); make them one dtype, or wrap them as units of "
            "their own"
        )
    return Unit(name=name, parameters=tuple(packed), trainable=trainable)
