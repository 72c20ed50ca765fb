"""The arguments of `FullyShardedDataParallel` and their other spellings: each is understood, or refused by name.

A table has the accepted values of every argument. A name of a strategy and torch's own enums, policies and precisions
mean what they mean in torch. Anything else is refused before a module is touched. `strategy` checks whether arguments
go together.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous, Policy, Synchronous
from axon_ps.types import parse_member

_EnumT = TypeVar("_EnumT", bound=enum.Enum)
_ValueT = TypeVar("_ValueT")


class _Refused(Exception):
    """The argument may not have this value."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `FullyShardedDataParallel` in their canonical form. See there for their meaning."""

    module: nn.Module
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision
    unit_types: tuple[type[nn.Module], ...]
    auto_wrap_policy: Callable[[nn.Module], bool] | None
    ignored_parameters: tuple[nn.Parameter, ...]
    intra_node_size: int | None
    prefetch: bool
    retain_frozen: bool
    param_init_fn: Callable[[nn.Module], None] | None
    plan_options: PlanOptions | None
    device: torch.device | None
    policy: Policy
    name: str | None
    line: tuple[int, ...] = ()


def checked(*, line: tuple[int, ...] = (), **given: Any) -> Arguments:
    """Return the arguments by name, in their canonical form. `line` is that of a mesh; see `mesh.union`.

    Raises:
        InvalidRequest: an argument may not have this value, and the message has the accepted ones; or
            `unit_types` and `auto_wrap_policy` were both given.
    """
    arguments = Arguments(**{name: understood(name, value) for name, value in given.items()}, line=line)
    if arguments.unit_types and arguments.auto_wrap_policy is not None:
        raise InvalidRequest("both unit_types and auto_wrap_policy were given; pass one of them")
    return arguments


def understood(name: str, value: Any, called: str | None = None) -> Any:
    """Return one argument in its canonical form. It raises as `checked` does; `called` is its name in the message."""
    meaning, wanted = _TABLE[name]
    try:
        return meaning(value)
    except _Refused as refused:
        why = f": {refused}" if str(refused) else ""
        raise InvalidRequest(f"{called or name} is {value!r}{why}; give {wanted}") from None


def strategy_of(value: Any) -> ShardingStrategy | None:
    """Return a sharding strategy by its name, or by torch's enum. It raises as `checked` does."""
    strategy: ShardingStrategy | None = understood("sharding_strategy", value)
    return strategy


# ---------------------------------------------------------------------- meanings: the value, or `_Refused`


def _is_torchs(value: Any, name: str) -> bool:
    """Return True if the value is of a class of torch's distributed package, which may never have been imported."""
    return type(value).__name__ == name and type(value).__module__.startswith("torch.distributed.")


def _member(kind: type[_EnumT], value: Any) -> _EnumT:
    try:
        return parse_member(value, kind, "it")
    except InvalidRequest:
        raise _Refused from None


def _strategy(value: Any) -> ShardingStrategy:
    if _is_torchs(value, "ShardingStrategy") and value.name not in ShardingStrategy.__members__:
        raise _Refused("there is no such strategy here; HYBRID_SHARD comes closest")
    return _member(ShardingStrategy, value)


def _policy(value: Any) -> Policy:
    if isinstance(value, Policy):
        return value
    known = {"synchronous": Synchronous, "sync": Synchronous, "asynchronous": Asynchronous, "async": Asynchronous}
    if value is None or (isinstance(value, str) and value.lower() in known):
        return known["sync" if value is None else value.lower()]()
    raise _Refused


def _offload(value: Any) -> CPUOffload:
    if _is_torchs(value, "CPUOffload"):
        value = value.offload_params
    elif _is_torchs(value, "CPUOffloadPolicy") or _is_torchs(value, "OffloadPolicy"):
        value = type(value).__name__ == "CPUOffloadPolicy"
    if value is None or isinstance(value, bool):  # as torch means it: gradients, too
        return CPUOffload.FULL if value else CPUOffload.NONE
    return _member(CPUOffload, value)


def _precision(value: Any) -> MixedPrecision:
    if _is_torchs(value, "MixedPrecision") or _is_torchs(value, "MixedPrecisionPolicy"):
        return MixedPrecision(
            param_dtype=value.param_dtype,
            reduce_dtype=value.reduce_dtype,
            output_dtype=getattr(value, "output_dtype", None),
            buffer_dtype=getattr(value, "buffer_dtype", None),
            cast_forward_inputs=getattr(value, "cast_root_forward_inputs", value.cast_forward_inputs),
            uncast_types=_kinds(getattr(value, "_module_classes_to_ignore", ())),
        )
    try:
        return MixedPrecision.of(value)
    except InvalidRequest:
        raise _Refused from None


def _kinds(value: Any) -> tuple[type[nn.Module], ...]:
    kinds = (value,) if isinstance(value, type) else value
    if isinstance(kinds, str) or not isinstance(kinds, Collection):
        raise _Refused
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise _Refused(f"{kind!r} is no module class")
    return tuple(kinds)


def _wrap_policy(value: Any) -> Callable[[nn.Module], bool] | None:
    """Return a policy that takes a module. torch's own get its number of parameters, too."""
    if value is None:
        return None
    if not callable(value) or isinstance(value, type):
        raise _Refused
    try:
        takes = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # a callable of C
        takes = set()
    if "recurse" not in takes:
        policy: Callable[[nn.Module], bool] = value
        return policy

    def asked(module: nn.Module) -> bool:
        numel = sum(p.numel() for p in module.parameters())
        counted = {"nonwrapped_numel": numel} if "nonwrapped_numel" in takes else {}
        return bool(value(module=module, recurse=False, **counted))

    return asked


def _parameters(value: Any) -> tuple[nn.Parameter, ...]:
    if isinstance(value, (str, torch.Tensor)) or not isinstance(value, Iterable):
        raise _Refused
    parameters = tuple(value)
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise _Refused(f"it has {type(parameter).__name__} {str(parameter)[:40]!r}, which is no parameter")
    return parameters


def _device(value: Any) -> torch.device | None:
    if value is None:
        return None
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _Refused(str(error).partition("\n")[0]) from error


def _an(kind: type[_ValueT], value: Any) -> _ValueT:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Refused
    return value


def _or_none(meaning: Callable[[Any], _ValueT], value: Any) -> _ValueT | None:
    return None if value is None else meaning(value)


def _function(value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise _Refused
    function: Callable[..., Any] = value
    return function


def _names(kind: type[enum.Enum]) -> str:
    return ", ".join(f"{kind.__name__}.{member}" for member in kind.__members__)


_TABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "module": (partial(_an, nn.Module), "an nn.Module"),
    "sharding_strategy": (partial(_or_none, _strategy), f"one of {_names(ShardingStrategy)}, or its name"),
    "cpu_offload": (_offload, f"one of {_names(CPUOffload)}, its name, True (FULL) or False (NONE)"),
    "mixed_precision": (_precision, "a MixedPrecision, a floating-point dtype or its name, True (bfloat16) or False"),
    "unit_types": (_kinds, "module classes, as in unit_types={Block}"),
    "auto_wrap_policy": (_wrap_policy, "a function that says of a module whether it becomes a unit, or None"),
    "ignored_parameters": (_parameters, "parameters of the module"),
    "intra_node_size": (partial(_or_none, partial(_an, int)), "how many workers a node has, or None"),
    "prefetch": (partial(_an, bool), "True or False"),
    "retain_frozen": (partial(_an, bool), "True or False"),
    "param_init_fn": (partial(_or_none, _function), "a function of a submodule, or None"),
    "plan_options": (partial(_or_none, partial(_an, PlanOptions)), "PlanOptions(...) or None"),
    "device": (_device, "a torch.device, its name, or None for where the module is"),
    "policy": (
        _policy,
        'Synchronous() or "sync", BoundedStaleness(max_staleness=...), Asynchronous() or "async", or None',
    ),
    "name": (partial(_or_none, partial(_an, str)), "a string, or None"),
}
"""By argument, the function that converts it, and the accepted values in messages."""
