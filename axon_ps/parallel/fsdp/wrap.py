"""Wrapping of a model: the units that its parameters form, from a module tree to a `Layout`.

The unit of a parameter is the innermost module around it that is a unit. A parameter in none belongs to the root. A
parameter that is reachable from two units (tied weights) belongs to the root, which is unsharded during all of forward
and backward. Frozen and trainable parameters of a module become two units of the layout, so that gradients and moments
exist only for the second. Frozen ones that are not in float32 become a third: they are *raw*.

Note: [Frozen parameters travel as their bits]
    A raw parameter has the dtype in which it was built: on the servers, on the wire, in checkpoints and exports
    (`sharding.layout`, Note: [Raw parameters]). It may have any dtype: quantised weights (uint8, int8, float8),
    bfloat16, float64, indices, masks. `param_dtype` casts bfloat16, float16 and float64 on the worker, and no other
    one: quantised values mean nothing without their scales. A frozen float32 parameter is not raw, so that it is sent
    as the trainable ones are. Only float32, bfloat16 and float16 parameters can be trainable.

Note: [Frozen parameters stay]
    No step changes a frozen unit, so it is gathered once in an epoch and then stays in the worker's memory, under
    FULL_SHARD too (`Wrapping.retains`). If gathered values are those that parameters compute with, the unit stays
    unsharded. If they are cast or copied to a GPU, a copy in host memory stays, in the wire dtype. A unit that is
    mapped in the memory of a server of this host takes no memory of the worker. With `retain_frozen=False` frozen units
    come and go as others do. With `CPUOffload.PARAMS` all units have host copies, and this does not apply.

Parameters have the names that state dicts have, without torch's wrappers for activation checkpointing. A model that
cannot be sharded is refused here, before any other process is told of it. The error names the parameter and a remedy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import is_

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.mesh.boxes import box_of, is_divided
from axon_ps.parallel.fsdp.mesh.groups import OptimizerGroups
from axon_ps.parallel.fsdp.mesh.lines import MeshLines
from axon_ps.parallel.fsdp.stats import Counters
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.precision import DTYPES, TORCH_DTYPES, MixedPrecision
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, Parameter, Unit, build_unit
from axon_ps.types import WIRE_DTYPES, DType, parse_dtype

ROOT = "(root)"

SHARDED_DTYPES = tuple(TORCH_DTYPES[dtype] for dtype in WIRE_DTYPES)
"""The dtypes of trainable parameters that can be stored on the servers and sent."""

_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
"""The module inside a wrapper of torch's activation checkpointing. It is in no name of a state dict."""

_WRAPPERS = {"FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"}
"""Classes that average gradients, ours and torch's."""


@dataclass(frozen=True, kw_only=True)
class WrappedUnit:
    """One unit of the layout, and the parameters that it is made of.

    Attributes:
        owner: name of the module it belongs to; "" for the root.
        unit: its layout.
        params: the parameters, in layout order.
        names: of each, its names in the user's module; () = those of the layout.
        number: its number in the layout.
        pushes: False if workers of another line of the mesh push its gradient; see `mesh.union`.
    """

    owner: str
    unit: Unit
    params: tuple[nn.Parameter, ...]
    names: tuple[tuple[str, ...], ...] = ()
    number: int = 0
    pushes: bool = True


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """The options with which a model is wrapped.

    Attributes:
        group: the workers that train it.
        strategy: the sharding strategy.
        offload: the part that is in host memory.
        precision: dtypes of compute and wire.
        spec: the spec that the model is registered with.
        name: the job's name for it.
        device: the device on which parameters compute.
        built: the dtype that holds the values of all parameters as they were built, except of raw ones.
        node_size: workers of a node.
        prefetch: True if units are gathered before they are needed.
        lines: those of the mesh; None = each worker has all of the model.
        groups: the optimizer's groups in all lines; None likewise.
        retain_frozen: True if frozen units stay in the memory of this worker; see Note: [Frozen parameters stay].
        uncast: names of units that compute in the dtype that they were built with, whatever the precision.
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
    lines: MeshLines | None = None
    groups: OptimizerGroups | None = None
    retain_frozen: bool = True
    uncast: frozenset[str] = frozenset()
    meter: Meter = field(default_factory=Meter)
    counters: Counters = field(default_factory=Counters)

    def computed(self, unit: Unit) -> Unit:
        """Return a unit as its parameters compute: itself, or a raw one in which some have another dtype."""
        dtypes = [DTYPES[self.compute_of(unit, p)] for p in unit.parameters]
        if not unit.raw or dtypes == [p.dtype for p in unit.parameters]:
            return unit
        named = [(p.name, p.shape, dtype) for p, dtype in zip(unit.parameters, dtypes, strict=True)]
        return build_unit(unit.name, named, trainable=False, raw=True)

    def compute_of(self, unit: Unit, parameter: Parameter) -> torch.dtype:
        """Return the dtype in which a parameter of a unit computes. Only floating-point ones are cast."""
        built = TORCH_DTYPES[parameter.dtype]
        casts = parameter.dtype.is_float and unit.name not in self.uncast
        return self.precision.compute(built) if casts else built

    def flat_of(self, unit: Unit) -> torch.dtype:
        """Return the dtype of the memory in which the parameters of a unit compute: f32 for words of raw ones."""
        return torch.float32 if unit.raw else self.compute_of(unit, unit.parameters[0])

    def gathers_directly(self, unit: Unit) -> bool:
        """Return True if gathered values are those that parameters compute with: nothing casts them."""
        return self.computed(unit) is unit and TORCH_DTYPES[self.wire_of(unit)] == self.flat_of(unit)

    @property
    def wire(self) -> DType:
        """The dtype of gathered values: the job's wire dtype; for compressed values, that of the computation."""
        wire, compute = self.spec.precision, self.precision.compute(self.built)
        return wire.param if wire.param_compression is None else parse_dtype(compute, "param_dtype")

    def wire_of(self, unit: Unit) -> DType:
        """Return the dtype of a unit's gathered values: `wire`, or that of words of raw parameters."""
        return DType.F32 if unit.raw else self.wire

    def retains(self, unit: Unit) -> bool:
        """Return True if a unit stays although the strategy reshards it; see Note: [Frozen parameters stay]."""
        reshards = self.strategy is ShardingStrategy.FULL_SHARD and not self.offload.offloads_params
        return self.retain_frozen and reshards and not unit.trainable

    @property
    def replicated(self) -> bool:
        """True if every worker has all of the model."""
        return self.strategy is ShardingStrategy.NO_SHARD

    @property
    def on_device(self) -> bool:
        """True if parameters compute on a GPU."""
        return cuda.memory().is_device(self.device)


def name_in_states(name: str) -> str:
    """Return the name that a parameter, a buffer or a module has in state dicts."""
    return ".".join(step for step in name.split(".") if step != _CHECKPOINT_WRAPPED)


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of a module, and the entry that has it.

    Attributes:
        holder: the dict of the module that has it.
        key: its key in that dict.
        param: the parameter.
        name: its name in the user's module.
    """

    holder: MutableMapping[str, nn.Parameter | None]
    key: str
    param: nn.Parameter
    name: str

    @property
    def now(self) -> nn.Parameter | None:
        """The parameter that the entry has now."""
        return self.holder.get(self.key)

    @property
    def is_empty(self) -> bool:
        """True if the entry has another value now."""
        return self.now is not self.param


def slots(module: nn.Module, params: Collection[nn.Parameter]) -> Iterator[Slot]:
    """Yield the slots of these parameters in a module and its children."""
    for prefix, child in module.named_modules():
        for key, param in child._parameters.items():
            if param is not None and param in params:
                yield Slot(child._parameters, key, param, f"{prefix}.{key}" if prefix else key)


class Tree:
    """The modules and parameters of a module as it was wrapped, and later changes.

    As long as nothing has changed, `look` costs about a microsecond a module.

    Args:
        module: the user's module.
        trained: those of its parameters that are wrapped, frozen ones too.
    """

    def __init__(self, module: nn.Module, trained: Collection[nn.Parameter]) -> None:
        self._module = module
        self._names = dict(self._named())
        self._known = set(self._names.values())
        self._trained = trained
        self._take()

    def look(self) -> Tree:
        """Look for changes, and return the tree itself."""
        if any(len(now) != len(before) or not all(map(is_, now.values(), before)) for now, before in self._seen):
            self._take()
        return self

    @property
    def replaced(self) -> str:
        """The first name at which a wrapped parameter was replaced by another one; "" = there is none."""
        return self._replaced

    @property
    def untrained(self) -> str:
        """The first parameter that requires a gradient and was not there when the module was wrapped; "" = none."""
        return next((name for param, name in self._added.items() if param.requires_grad), "")

    def added(self, param: nn.Parameter) -> str:
        """Return the name of a parameter that was added since the module was wrapped; "" for any other."""
        return self._added.get(param, "")

    def change_of(self, name: str) -> str:
        """Return the change that gave another parameter this name, for messages."""
        return "replaced" if name in self._names else "added"

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, param in self._module.named_parameters(remove_duplicate=False):
            yield name_in_states(path), param

    def _take(self) -> None:
        held: list[Mapping[str, object]] = [
            members for child in self._module.modules() for members in (child._modules, child._parameters)
        ]
        self._seen = [(members, tuple(members.values())) for members in held]
        self._added = {param: name for name, param in self._named() if param not in self._known}
        moved = ((name, self._names.get(name, param), param) for name, param in self._named())
        self._replaced = next((n for n, before, now in moved if before is not now and before in self._trained), "")


def module_of(root: nn.Module, name: str) -> nn.Module:
    """Return the module that state dicts have by a name."""
    found = root.get_submodule(name)
    while (inside := found._modules.get(_CHECKPOINT_WRAPPED)) is not None:
        found = inside
    return found


def refuse_wrapped(module: nn.Module, wrapper: str) -> None:
    """Raise if a module to be wrapped is wrapped already, or has a wrapped one inside.

    Args:
        module: the module to be wrapped.
        wrapper: the class that is to wrap it.

    Raises:
        InvalidRequest: the message names the module inside.
    """
    for name, child in module.named_modules():
        found = next((base.__name__ for base in type(child).__mro__ if base.__name__ in _WRAPPERS), None)
        if found is None:
            continue
        if child is module:
            raise InvalidRequest(f"the module is wrapped by {found} already; use it as it is, or wrap the one inside")
        raise InvalidRequest(
            f"{wrapper} was given a module of which {name_in_states(name)!r} is wrapped by {found} already. A model is "
            "wrapped once, at its root: leave the inner wrappers out, and name the classes that are to be gathered "
            f"together: FSDP(model, unit_types={{{type(_inside(child)).__name__}}})"
        )


def refuse_sparse(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise if a parameter would get sparse gradients.

    Raises:
        InvalidRequest: the message names the parameter.
    """
    for name, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)) or not child.sparse:
            continue
        if child.weight.requires_grad and not any(child.weight is other for other in ignored):
            weight = name_in_states(f"{name}.weight" if name else "weight")
            raise InvalidRequest(sparse_gradient(weight, f"{type(child).__name__}(sparse=True)"))


def sparse_gradient(name: str, cause: str) -> str:
    """Return the message on a parameter that gets a sparse gradient."""
    return (
        f"parameter {name!r} has sparse gradients ({cause}), and gradients are summed as dense ones; use sparse=False, "
        "which gives the same values"
    )


def partition(
    module: nn.Module, is_unit: Callable[[nn.Module], bool], ignored: Collection[nn.Parameter] = ()
) -> tuple[WrappedUnit, ...]:
    """Divide a module into units, the root first, the others in module order. `ignored` parameters are in none.

    Raises:
        InvalidRequest: there is no parameter, or one of a dtype or kind that cannot be sharded; or a unit of parameters
            that are not raw has several dtypes.
    """
    owners = ["", *_unit_names(module, is_unit)]
    paths: dict[nn.Parameter, list[str]] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        if not any(param is other for other in ignored):
            paths.setdefault(param, []).append(path)
    if not paths:
        raise InvalidRequest("the module has no parameters (beside those to be ignored); there is nothing to shard")
    names = {param: [name_in_states(path) for path in found] for param, found in paths.items()}
    for param, (first, *_) in names.items():
        _check_parameter(param, first)
    members: dict[tuple[str, _Kind], list[nn.Parameter]] = {}
    for param, aliases in paths.items():
        found = {_owner(path, owners) for path in aliases}
        owner = found.pop() if len(found) == 1 else ""
        members.setdefault((owner, _kind(param)), []).append(param)
    wrapped_units: list[WrappedUnit] = []
    for owner in owners:
        for kind in _Kind:
            params = members.get((owner, kind))
            if params:
                name = (name_in_states(owner) or ROOT) + kind.value
                wrapped_units.append(
                    WrappedUnit(
                        owner=owner,
                        unit=_unit(name, params, names, kind),
                        params=tuple(params),
                        names=tuple(tuple(names[param]) for param in params),
                        number=len(wrapped_units),
                    )
                )
    return tuple(wrapped_units)


def divide(
    module: nn.Module,
    is_unit: Callable[[nn.Module], bool] | None,
    unit_types: tuple[type[nn.Module], ...],
    precision: MixedPrecision,
    ignored: Collection[nn.Parameter],
) -> tuple[tuple[WrappedUnit, ...], MixedPrecision, frozenset[str]]:
    """Return the units of a module, the precision that applies to them, and the names of submodules that are not cast.

    `MixedPrecision.uncast_types` have no effect if neither `is_unit` nor `unit_types` are given, as in torch.

    Raises:
        InvalidRequest: as of `partition`.
    """
    types = precision.uncast_types if is_unit is not None or unit_types else ()
    chosen = is_unit or (lambda child: isinstance(child, unit_types))
    units = partition(module, lambda child: isinstance(child, types) or chosen(child), ignored)
    uncast = tuple(w for w in units if w.owner and isinstance(module.get_submodule(w.owner), types))
    wire = precision.wire_dtype
    if uncast and wire is None:
        wire = torch.promote_types(precision.compute(widest_dtype(units)), widest_dtype(uncast))
    applied = replace(precision, uncast_types=types, wire_dtype=wire)
    return units, applied, frozenset(w.owner for w in uncast)


def refuse_shared_memory(module: nn.Module, wrapped_units: Sequence[WrappedUnit]) -> None:
    """Raise if a parameter to be sharded overlaps with another tensor of the module: its memory will be replaced.

    Neighbours in one storage do not overlap. The weights of an `nn.LSTM` are such neighbours under cuDNN.

    Args:
        module: the module to be wrapped.
        wrapped_units: its units.

    Raises:
        InvalidRequest: the message names both.
    """
    sharded_params = {param for wrapped in wrapped_units for param in wrapped.params}
    ranges = sorted(
        (*memory, what, tensor in sharded_params)
        for what, tensor in _named_tensors(module)
        if (memory := _bytes_of(tensor)) is not None
    )
    last: dict[bool, tuple[str, int, str]] = {True: ("", 0, ""), False: ("", 0, "")}  # of either kind, the last end
    for device, begin, end, what, sharded in ranges:
        for other_sharded, (other_device, other_end, other) in last.items():
            if (sharded or other_sharded) and (device, begin) < (other_device, other_end):
                raise InvalidRequest(
                    f"{what} and {other} have memory in common (one is made of the other's data, or a view of it), and "
                    "a sharded parameter has memory of its own: what the optimizer does to one would not reach the "
                    "other. To tie two parameters assign the same nn.Parameter to both modules; compute a transposed "
                    "or sliced weight in forward (torch.nn.utils.parametrize); for values that part ways, clone()"
                )
        last[sharded] = max(last[sharded], (device, end, what))


def layout_of(wrapped_units: tuple[WrappedUnit, ...]) -> Layout:
    """Return the layout of these units."""
    return Layout(units=tuple(p.unit for p in wrapped_units))


def widest_dtype(wrapped_units: tuple[WrappedUnit, ...]) -> torch.dtype:
    """Return the dtype that holds the values of all parameters as they were built, except of raw ones."""
    numbers = [w.unit.parameters[0].dtype for w in wrapped_units if not w.unit.raw]
    return reduce(torch.promote_types, (TORCH_DTYPES[dtype] for dtype in numbers or [DType.F32]))


def _unit_names(module: nn.Module, is_unit: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of the modules that are units, beside the root.

    None is inside an `nn.MultiheadAttention`, which reads the weight of its `out_proj` without running it.
    """
    found: list[str] = []
    closed: list[str] = []
    for name, child in module.named_modules():
        if name and is_unit(child) and not any(name.startswith(f"{outer}." if outer else "") for outer in closed):
            found.append(name)
        if isinstance(child, nn.MultiheadAttention):
            closed.append(name)
    return found


def _owner(parameter_name: str, owners: list[str]) -> str:
    return max((o for o in owners if not o or parameter_name.startswith(o + ".")), key=len)


def _inside(module: nn.Module) -> nn.Module:
    """Return the module in a wrapper."""
    inside = getattr(module, "module", module)
    return inside if isinstance(inside, nn.Module) else module


def _check_parameter(param: nn.Parameter, name: str) -> None:
    """Raise if a parameter cannot be sharded."""
    beside = "give it in FSDP's ignored_parameters (each worker retains its own, without averages)"
    if isinstance(param, nn.UninitializedParameter):
        raise InvalidRequest(f"parameter {name!r} has no shape yet; run a lazy module once before wrapping it")
    if hasattr(param, "_axon_home"):
        raise InvalidRequest(f"parameter {name!r} is of a module that is wrapped already; build the module anew")
    if not issubclass(type(param), nn.Parameter) and not is_divided(param):
        raise InvalidRequest(
            f"parameter {name!r} is a {type(param).__name__}; needed is a plain tensor. Build it without that class, "
            f"or {beside}"
        )
    if param.layout != torch.strided:
        raise InvalidRequest(f"parameter {name!r} has layout {param.layout}; only dense parameters can be sharded")
    if not box_of(param).numel():
        raise InvalidRequest(
            f"parameter {name!r} has shape {list(box_of(param).shape)}, so no elements; there is nothing of it to "
            f"train: leave it out, make it a buffer (register_buffer), or {beside}"
        )
    if _kind(param) is _Kind.RAW and param.dtype not in DTYPES:
        raise InvalidRequest(
            f"parameter {name!r} has dtype {param.dtype}, which cannot be sharded: view it as torch.uint8, or {beside}"
        )
    if param.requires_grad and param.dtype not in SHARDED_DTYPES:
        possible = ", ".join(map(str, SHARDED_DTYPES))
        raise InvalidRequest(
            f"parameter {name!r} has dtype {param.dtype}; a trainable one can be one of {possible}: build it in one of "
            f"these (module.float()), freeze it (requires_grad_(False)) before wrapping, or {beside}"
        )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, buffers and other tensors that are attributes of a module and its children, each once."""
    known: set[int] = set()
    for prefix, child in module.named_modules():
        own = {
            k: v for k, v in vars(child).items() if f"{k}_orig" not in child._parameters
        }  # spectral_norm's, by hooks
        kinds = {"parameter": child._parameters, "buffer": child._buffers, "attribute": own}
        for kind, members in kinds.items():
            for key, tensor in members.items():
                if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{kind} {name_in_states(f'{prefix}.{key}' if prefix else key)!r}", tensor


def _bytes_of(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """Return a tensor's device, first byte and the byte after its last one; None if it has no memory of its own."""
    plain = type(tensor) is torch.Tensor or issubclass(type(tensor), nn.Parameter)
    if not plain or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (last + 1) * tensor.element_size()


class _Kind(enum.Enum):
    """The kinds of parameters of a module, each of which is a unit of its own; the value follows the module's name."""

    TRAINABLE = ""
    FROZEN = " (frozen)"
    RAW = " (raw)"


def _kind(param: nn.Parameter) -> _Kind:
    if param.requires_grad:
        return _Kind.TRAINABLE
    return _Kind.FROZEN if param.dtype is torch.float32 else _Kind.RAW


def _unit(name: str, params: list[nn.Parameter], names: dict[nn.Parameter, list[str]], kind: _Kind) -> Unit:
    packed: list[Parameter] = []
    offset = 0
    for param in params:
        first, *aliases = names[param]
        packed.append(
            Parameter(
                name=first,
                shape=tuple(box_of(param).shape),
                offset=offset,
                dtype=DTYPES[param.dtype],
                aliases=tuple(aliases),
                raw=kind is _Kind.RAW,
            )
        )
        offset = packed[-1].end
    by_dtype = {p.dtype: p.name for p in reversed(packed)}
    if len(by_dtype) > 1 and kind is not _Kind.RAW:
        listed = ", ".join(f"{TORCH_DTYPES[d]} ({by_dtype[d]!r})" for d in sorted(by_dtype, key=lambda d: d.value))
        raise InvalidRequest(
            f"unit {name!r} has parameters of several dtypes: {listed}; make them one dtype, or make units of the "
            "modules that have another one (unit_types)"
        )
    return Unit(name=name, parameters=tuple(packed), trainable=kind is _Kind.TRAINABLE)
