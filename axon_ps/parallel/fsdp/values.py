"""`WrappedValues`: the values of a wrapped model: unsharded for a while, replaced, and as state dicts have them."""

from __future__ import annotations

import itertools
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.parallel.checkpoints.buffers import ServedBuffers
from axon_ps.parallel.fsdp.forwards import check_idle
from axon_ps.parallel.fsdp.masters import TORN
from axon_ps.parallel.fsdp.mesh.boxes import box_in, is_divided, like
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.tensors import saved_tensors
from axon_ps.parallel.fsdp.wrap import Wrapping, module_of, name_in_states
from axon_ps.parallel.precision import TORCH_DTYPES, view_of
from axon_ps.parallel.wrapper import Uncopied

T = TypeVar("T")

_ValueOf: TypeAlias = Callable[[tuple[str, ...]], torch.Tensor | None]
"""Returns the value of the parameter of these names; None if there is none."""


class WrappedValues:
    """The values of a wrapped model's parameters and buffers, under any strategy.

    Args:
        module: the user's module.
        wrapping: the options with which it is wrapped.
        runtime: its runtime.
        buffer_dtypes: by name, the dtypes in which buffers were built, if they compute in another one.
        served: its buffers on the servers, if it has any there.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapping: Wrapping,
        runtime: Runtime,
        buffer_dtypes: Mapping[str, torch.dtype],
        served: ServedBuffers | None,
    ) -> None:
        self._module = module
        self._layout = wrapping.spec.layout
        self._lines = wrapping.lines
        self._runtime = runtime
        self._buffer_dtypes = buffer_dtypes
        self._served = served
        if not wrapping.replicated:
            for path, child in module.named_modules():
                child.register_load_state_dict_pre_hook(partial(_refuse_loading, name_in_states(path)))
        module.register_state_dict_post_hook(_Fill(self))  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ unsharded

    @contextmanager
    def summoned(self, *, writeback: bool) -> Iterator[None]:
        """See `FullyShardedDataParallel.summon_full_params`."""
        check_idle(self._runtime.units, "summon_full_params")
        new: dict[str, torch.Tensor] = {}
        pushed = saved_tensors.push()
        try:
            self._runtime.gather()
            flats = [flat for flat in self._runtime.flats if flat.sharded]
            named = [(names[0], t) for flat in flats for names, t in zip(flat.names, flat.params, strict=True)]
            before = [param._version for _, param in named]
            yield
            changed = [(n, p) for (n, p), version in zip(named, before, strict=True) if p._version != version]
            new = {name: param.detach().clone() for name, param in changed} if writeback else {}
            torn = self._runtime.one_version.torn
        finally:
            if pushed:
                saved_tensors.pop()
            self._runtime.reset()
        if changed:
            for flat in self._runtime.flats:
                flat.free_storage()  # also if the strategy would retain the changed values
            if not writeback:
                raise Misuse(
                    f"{len(changed)} parameters were changed inside summon_full_params(), and the shard servers still "
                    "have the old values; pass writeback=True, on every worker, or give them others with "
                    "load_state_dict() or update_shards()"
                )
        if torn:
            raise StepAborted(TORN)
        if writeback and named and any(self._runtime.masters.gather(len(new))):
            value_of = partial(_value_in, new)
            self._runtime.masters.replace(self._new_values(value_of, self._staying(value_of)))

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `FullyShardedDataParallel.full_parameters`."""
        sets = self._layout.unit_sets
        units = self._runtime.masters.units(unit for found in sets for unit in found.units)
        for found in sets:
            values: dict[str, torch.Tensor] = {}
            for unit in found.units:  # `zip` would hold the values of a unit while the next one's are read
                flat = next(units)
                for p in self._layout.units[unit].parameters:
                    value = view_of(flat, p)
                    if p.full is None:
                        values[p.name] = value
                    else:
                        values.setdefault(p.full.name, value.new_empty(p.full.shape))[p.box] = value
                del flat, value
            for tensor in found.tensors:
                yield tensor.name, values.pop(tensor.name)

    def _boxes(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter, torch.Tensor]]:
        """Yield the parameters of this worker, with their names and the values that are its own, f32."""
        flats = self._runtime.flats
        units = self._runtime.masters.units([flat.index for flat in flats])
        for flat in flats:
            values = next(units)
            for names, spec, param in zip(flat.names, flat.unit.parameters, flat.params, strict=True):
                yield names, param, view_of(values, spec)
            del values

    @property
    def sharded(self) -> set[nn.Parameter]:
        """The parameters that the strategy shards."""
        return {p for flat in self._runtime.flats for p in flat.params}

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function of `to()`, `cuda()`, `half()` and their like to buffers and ignored parameters.

        Raises:
            Misuse: it would move or cast sharded parameters.
        """
        managed = self.sharded
        for dtype, device in {(p.dtype, p.device) for p in managed}:
            there = fn(torch.empty(0, dtype=dtype, device=device))
            if (there.dtype, there.device) != (dtype, device):
                raise Misuse(
                    f"the parameters of a wrapped model cannot go from {dtype} on {device} to {there.dtype} on "
                    f"{there.device}; give device= and mixed_precision= when you wrap it"
                )
        for child in self._module.modules():
            child._buffers.update({k: fn(b) for k, b in child._buffers.items() if b is not None})
            for param in {p for p in child._parameters.values() if p is not None} - managed:
                param.data = fn(param.data)

    # ------------------------------------------------------------------ state dicts

    def fill(self, state: dict[str, Any], prefix: str) -> None:
        """Give the values to a state dict of the user's module, whose names begin with `prefix`."""
        if self._served is not None:
            self._served.follow()
        flats = self._runtime.flats
        built = {n[0]: p.dtype for flat in flats for n, p in zip(flat.names, flat.unit.parameters, strict=True)}
        keys = {prefix + name for flat in flats for names in flat.names for name in names}
        wanted = {key for key in keys if key in state and not isinstance(state[key], nn.Parameter)}
        if not wanted:
            return  # keep_vars
        self._runtime.units[0].check_replaced()
        for names, param, value in self._boxes():
            copy = like(param, value.to(TORCH_DTYPES[built[names[0]]], copy=True))
            del value
            state.update({k: copy for k in (prefix + n for n in names) if k in wanted})
        members = (
            self._module.named_parameters(remove_duplicate=False),
            self._module.named_buffers(remove_duplicate=False),
        )
        for path, own in itertools.chain(*members):
            name = name_in_states(path)
            if (key := prefix + name) in state and key not in keys:
                state[key] = own.detach().to(self._buffer_dtypes.get(name, own.dtype), copy=True)

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> _IncompatibleKeys:
        """See `FullyShardedDataParallel.load_state_dict`."""
        given, keys, old = self._agreed("load_state_dict", lambda: self._fitting(state_dict, strict, assign))
        sharded = self._sharded_names()
        with torch.no_grad():
            for name, tensor in self._module.state_dict(keep_vars=True).items():
                if name in given and name not in sharded and isinstance(tensor, torch.Tensor):
                    tensor.copy_(given[name])
        self._runtime.masters.replace(self._new_values(partial(_value_in, given), old))
        return keys

    def update(self, flat: Any) -> None:
        """See `FullyShardedDataParallel.update_shards`."""
        if self._lines is not None:
            raise InvalidRequest(
                "update_shards() takes the values of all parameters, and a worker of a mesh has some; use "
                "load_state_dict()"
            )
        values = self._agreed("update_shards", lambda: self._divided(flat))
        shapes = {p.name: p.shape for _, p in self._layout.parameters()}
        self._runtime.masters.replace(self._new_values(lambda names: values[names[0]].view(shapes[names[0]]), {}))

    def _sharded_names(self) -> set[str]:
        return {name for flat in self._runtime.flats for names in flat.names for name in names}

    def _fitting(
        self, state_dict: Mapping[str, Any], strict: bool, assign: bool
    ) -> tuple[dict[str, Any], _IncompatibleKeys, dict[str, torch.Tensor]]:
        """Return the values of a state dict that fit, the missing and unknown names, and the values that stay.

        Extra state is set here.

        Raises:
            InvalidRequest: as `load_state_dict`.
        """
        if assign:
            raise InvalidRequest("load_state_dict(assign=True) cannot be: the values of a sharded model are elsewhere")
        own = self._module.state_dict(keep_vars=True)
        keys = _IncompatibleKeys([k for k in own if k not in state_dict], [k for k in state_dict if k not in own])
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise InvalidRequest(
                f"the state dict does not fit: missing {keys.missing_keys}, unexpected {keys.unexpected_keys}; pass "
                "strict=False to load what fits"
            )
        tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}
        for name, tensor in tensors.items():
            if name in state_dict:
                _check_value(repr(name), state_dict[name], tensor)
        given = {name: state_dict[name] for name in own if name in state_dict}
        for name in given.keys() - tensors.keys():  # extra state
            module_of(self._module, name.rpartition(".")[0]).set_extra_state(given[name])
        return given, keys, self._staying(partial(_value_in, given))

    def _agreed(self, what: str, prepare: Callable[[], T]) -> T:
        """Return the result of `prepare`, once it has returned on every rank; collective.

        Raises:
            AxonError: `prepare` failed on another rank; as of `Masters.together`.
            Exception: `prepare` raised it here.
        """
        prepared: list[T] = []

        def perform() -> None:
            check_idle(self._runtime.units, what)
            self._runtime.reset()
            prepared.append(prepare())

        self._runtime.masters.together(f"{what}() changed nothing, since it failed", perform)
        return prepared[0]

    def _staying(self, value_of: _ValueOf) -> dict[str, torch.Tensor]:
        """Return the values of all parameters if some get no new one, since the servers drop all present values."""
        some_stay = any(value_of(names) is None for flat in self._runtime.flats for names in flat.names)
        return {names[0]: value for names, _, value in self._boxes()} if some_stay else {}

    def _divided(self, flat: Any) -> dict[str, torch.Tensor]:
        """Return each parameter's part of a flat tensor, by name."""
        layout = self._layout
        try:
            flat = flat if isinstance(flat, torch.Tensor) else torch.as_tensor(flat, dtype=torch.float32, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest(
                f"update_shards() was given {reprlib.repr(flat)}; it needs one tensor of {layout.count} numbers, all "
                f"parameters one after the other: {error}"
            ) from error
        if flat.shape != (layout.count,):
            raise InvalidRequest(f"flat has shape {list(flat.shape)}; needed is [{layout.count}], one per parameter")
        _check_value("flat", flat, torch.empty(layout.count, dtype=torch.float32, device="meta"))
        values = torch.split(flat.detach(), [p.count for _, p in layout.parameters()])
        return {p.name: value for (_, p), value in zip(layout.parameters(), values, strict=True)}

    def _new_values(self, value_of: _ValueOf, old: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield f32[unit_numel] of every unit of this worker; words, of raw parameters."""
        for flat in self._runtime.flats:
            values = torch.zeros(flat.unit.numel, dtype=torch.float32, device="cpu")  # some words may be unused
            for names, spec, param in zip(flat.names, flat.unit.parameters, flat.params, strict=True):
                value = value_of(names)
                new = old[names[0]] if value is None else box_in(value.detach(), param)
                view_of(values, spec).copy_(new)
            yield values


class _Fill(Uncopied):
    """The hook that puts values into `state_dict()` of the user's module, as long as there is a wrapper."""

    def __init__(self, values: WrappedValues) -> None:
        self._values = weakref.ref(values)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if (found := self._values()) is not None:
            found.fill(state, prefix)


def _refuse_loading(path: str, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse values that torch loads into a part of a wrapped model.

    The entries that the wrapper loads have been taken out.

    Raises:
        Misuse: they would be loaded into sharded parameters.
    """
    names = [n for n, p in module._parameters.items() if hasattr(p, "_axon_home") and prefix + n in state_dict]
    if names:
        full = f"{path}.{names[0]}" if path else names[0]
        raise Misuse(
            f"load_state_dict() was called on a module inside the wrapped model, and the values of {full!r} are on the "
            "shard servers. Every worker calls load_state_dict() of the wrapped model, for some of its parameters with "
            f"strict=False and the names that they have there: model.load_state_dict({{{full!r}: ...}}, strict=False)"
        )


def _value_in(given: Mapping[str, Any], names: Iterable[str]) -> torch.Tensor | None:
    """Return the value under one of a parameter's names; None if there is none."""
    return next((given[name] for name in names if name in given), None)


def _check_value(what: str, value: Any, target: torch.Tensor) -> None:
    """Check that a value of a state dict can be copied to `target`, whose memory is not touched.

    Raises:
        InvalidRequest: it cannot be, or would lose its imaginary part.
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidRequest(f"{what} is a {type(value).__name__} in the state dict; give a tensor (torch.as_tensor)")
    if value.shape != target.shape:
        raise InvalidRequest(
            f"{what} has shape {list(value.shape)} in the state dict and {list(target.shape)} in the model"
        )
    made = f"{what} is a tensor of {value.dtype} with the layout {value.layout} on {value.device} in the state dict"
    if value.is_meta:
        raise InvalidRequest(f"{made}, which has no values; load it with a map_location that has")
    if value.is_complex() and not target.is_complex():
        raise InvalidRequest(f"{made}, and the model's is of {target.dtype}; give its real part")
    try:  # quantised, sparse, of a class of its own: a tensor is right if torch can copy it
        if _is_special(value) and not is_divided(value):
            torch.empty(target.shape, dtype=target.dtype, device="cpu").copy_(value)
    except Exception as error:
        raise InvalidRequest(f"{made}, which cannot be copied: {error}; give a dense tensor") from error


def _is_special(value: torch.Tensor) -> bool:
    known = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return not known or value.layout is not torch.strided or value.is_quantized
