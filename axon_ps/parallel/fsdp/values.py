"""The values of a wrapped model's parameters: unsharded, replaced, saved and loaded, under any strategy."""

from __future__ import annotations

import itertools
import reprlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from axon_ps.errors import CheckpointCorrupt, InvalidRequest, Misuse, StepAborted
from axon_ps.parallel.checkpoints import own_state
from axon_ps.parallel.checkpoints.buffers import ServedBuffers
from axon_ps.parallel.counterpart import as_in_torch
from axon_ps.parallel.fsdp.masters import TORN
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.tensors import saved_tensors
from axon_ps.parallel.fsdp.wrap import Wrapping, module_of, name_in_states
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.parallel.wrapper import ModuleWrapper, Uncopied
from axon_ps.sharding.layout import Parameter
from axon_ps.worker.checkpoints import CheckpointInfo

T = TypeVar("T")

_GROUPS: Final = "axon_ps.param_groups"
"""The key of the optimizer's groups in a checkpoint's `extra`."""


class ShardedValues(ModuleWrapper):
    """The values of `FullyShardedDataParallel`: reading, replacing and saving them."""

    _wrapping: Wrapping
    _runtime: Runtime
    _buffer_dtypes: dict[str, torch.dtype]
    _served_buffers: ServedBuffers | None = None
    _missing = 0

    def _follow_restores(self) -> None:
        """Take the buffers of a checkpoint that any process has restored since."""
        if self._served_buffers is not None:
            self._served_buffers.follow()

    def _check_idle(self, what: str) -> None:
        if any(u.depth for u in self._runtime.units):
            raise Misuse(f"{what}() was called inside a forward; call it between steps")

    # ------------------------------------------------------------------ unsharded parameters

    @contextmanager
    def summon_full_params(self, *, writeback: bool = False) -> Iterator[None]:
        """Give every parameter its current value, in compute dtype, inside the block.

        Args:
            writeback: True to make changes in place the values on the servers, as by `load_state_dict()`; every worker
                calls it then, and the changes of the worker of lowest rank count. If False, parameters are to be read,
                not changed. Under NO_SHARD changes are this worker's own in either case.

        Raises:
            Misuse: a forward or backward is under way; or, at the end, parameters were changed in place, and that has
                no effect.
            StepAborted: at the end: the job went on without this worker, so the values may be of several versions.
        """
        self._check_idle("summon_full_params")
        new: dict[str, torch.Tensor] = {}
        pushed = saved_tensors.push()
        try:
            self._runtime.gather_all()
            flats = [flat for flat in self._runtime.flats if flat.sharded]
            named = [(p.name, t) for flat in flats for p, t in zip(flat.unit.parameters, flat.params, strict=True)]
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

    def sharded_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the strategy shards: all but `ignored_parameters`, tied ones once."""
        managed = {p for flat in self._runtime.flats for p in flat.params}
        return (p for p in self.parameters() if p in managed)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply `to()`, `cuda()`, `half()` and their like to buffers and ignored parameters, as in any module.

        Raises:
            Misuse: it would move or cast sharded parameters.
        """
        managed = set(self.sharded_parameters())
        for dtype, device in {(p.dtype, p.device) for p in managed}:
            there = fn(torch.empty(0, dtype=dtype, device=device))
            if (there.dtype, there.device) != (dtype, device):
                raise Misuse(
                    f"the parameters of a wrapped model cannot go from {dtype} on {device} to {there.dtype} on "
                    f"{there.device}; give device= and mixed_precision= when you wrap it"
                )
        for child in self.module.modules():
            child._buffers.update({k: fn(b) for k, b in child._buffers.items() if b is not None})
            for param in {p for p in child._parameters.values() if p is not None} - managed:
                param.data = fn(param.data)
        return self

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter as f32, exactly as on the servers (NO_SHARD: in the optimizer), one after the other.

        This takes the memory of one unit at a time.

        Raises:
            StepAborted: the job went on without this worker (it was frozen or cut off), so the values read are of
                several versions; begin again. Under an asynchronous policy they may always be.
        """
        for unit, values in zip(self._wrapping.spec.layout.units, self._runtime.masters.units(), strict=True):
            for spec in unit.parameters:
                yield spec.name, values[spec.offset : spec.end].view(spec.shape)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return every parameter in the dtype it was built with, and every buffer, by the names of the user's module.

        Each worker gets all of it, without the help of others; for models too big for that use
        `world.save_checkpoint` and `axon-ps checkpoint export`. `state_dict()` of the user's module, and functions
        built on it (`save_pretrained()` of transformers), give the same. Tied parameters are one tensor under several
        names, as in torch.

        Args:
            args: as `nn.Module.state_dict` takes them.
            destination: the dict to fill; None = a new dict.
            prefix: beginning of all names.
            keep_vars: give the parameters themselves, which have no values.
        """
        given: dict[str, Any] = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        if args:
            given |= dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        state: dict[str, Any] = self.module.state_dict(**given)
        return state

    def _hook_state_dicts(self) -> None:
        """Have `state_dict()` of the user's module give values, as long as there is a wrapper."""

        def end_of_loading(module: nn.Module, keys: _IncompatibleKeys) -> None:
            assert isinstance(module, ShardedValues)
            del keys.missing_keys[module._missing :]  # torch went into the user's module, and found nothing there

        if not self._wrapping.replicated:
            for path, child in self.module.named_modules():
                child.register_load_state_dict_pre_hook(partial(_refuse_loading, name_in_states(path)))
        self.module.register_state_dict_post_hook(_Fill(self))  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(end_of_loading)  # type: ignore[no-untyped-call]

    def _fill(self, state: dict[str, Any], prefix: str) -> None:
        self._follow_restores()
        by_name = {p.name: p for _, p in self._wrapping.spec.layout.parameters()}
        keys = {prefix + alias for p in by_name.values() for alias in (p.name, *p.aliases)}
        wanted = {key for key in keys if key in state and not isinstance(state[key], nn.Parameter)}
        if not wanted:
            return  # keep_vars
        self._runtime.units[0].check_replaced()
        for name, value in self.full_parameters():
            copy = value.to(TORCH_DTYPES[by_name[name].dtype], copy=True)
            state.update({k: copy for k in (prefix + n for n in (name, *by_name[name].aliases)) if k in wanted})
        members = (
            self.module.named_parameters(remove_duplicate=False),
            self.module.named_buffers(remove_duplicate=False),
        )
        for path, own in itertools.chain(*members):
            name = name_in_states(path)
            if (key := prefix + name) in state and key not in keys:
                state[key] = own.detach().to(self._buffer_dtypes.get(name, own.dtype), copy=True)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Give every parameter and buffer other values; optimizer state and version stay. Every worker calls it.

        Parameters are those that the worker of lowest rank gives; buffers are each worker's own.

        Args:
            state_dict: by the names of the user's module, as `state_dict()` gives.
            strict: names must match exactly; else the values of missing ones stay.
            assign: must be False.

        Returns:
            The missing and unexpected names.

        Raises:
            InvalidRequest: names, shapes or values do not fit, or `assign` is set.
            Disagreement: they do not fit on another rank, which the message names.

        After an error: if it is of these two, no parameter and no buffer has changed, on any rank. For others see
        `World.replace_parameters`.
        """
        given, keys, old = self._agreed("load_state_dict", lambda: self._fitting(state_dict, strict, assign))
        sharded = self._sharded_names()
        with torch.no_grad():
            for name, tensor in self.module.state_dict(keep_vars=True).items():
                if name in given and name not in sharded and isinstance(tensor, torch.Tensor):
                    tensor.copy_(given[name])
        self._runtime.masters.replace(self._new_values(partial(_value_in, given), old))
        return keys

    def _sharded_names(self) -> set[str]:
        return {alias for _, p in self._wrapping.spec.layout.parameters() for alias in (p.name, *p.aliases)}

    def _fitting(
        self, state_dict: Mapping[str, Any], strict: bool, assign: bool
    ) -> tuple[dict[str, Any], _IncompatibleKeys, dict[str, torch.Tensor]]:
        """Return the values of a state dict that fit, the names that do not, and the values that stay.

        Only extra state is set here.

        Raises:
            InvalidRequest: as `load_state_dict`.
        """
        if assign:
            raise InvalidRequest("load_state_dict(assign=True) cannot be: the values of a sharded model are elsewhere")
        own = self.module.state_dict(keep_vars=True)
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
            module_of(self.module, name.rpartition(".")[0]).set_extra_state(given[name])
        return given, keys, self._staying(partial(_value_in, given))

    def _agreed(self, what: str, prepare: Callable[[], T]) -> T:
        """Return the result of `prepare`, once every rank has it; collective.

        Raises:
            Disagreement: another rank does not have it; the message says why.
            Exception: `prepare` raised it here.
        """
        prepared: list[T] = []

        def perform() -> None:
            self._check_idle(what)
            self._runtime.reset()
            prepared.append(prepare())

        self._runtime.masters.together(f"{what}() changed nothing, since it failed", perform)
        return prepared[0]

    def _staying(self, value_of: Callable[[Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the values of all parameters if some get no new one, since the servers drop all present values."""
        some_stay = any(value_of(p) is None for _, p in self._wrapping.spec.layout.parameters())
        return dict(self.full_parameters()) if some_stay else {}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as a part of `load_state_dict()` of a module around this one; every worker must call that."""
        ours = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        try:
            keys = self.load_state_dict({n.removeprefix(prefix): value for n, value in ours.items()}, strict=False)
            missing_keys += [prefix + name for name in keys.missing_keys]
            unexpected_keys += [prefix + name for name in keys.unexpected_keys]
        except InvalidRequest as error:
            error_msgs.append(str(error))
        self._missing = len(missing_keys)

    def update_shards(self, flat: torch.Tensor) -> None:
        """Give every parameter other values, from one flat tensor. Every worker calls it.

        Args:
            flat: [total_params], the parameters one after the other in layout order (that of `full_parameters()`); that
                of the worker of lowest rank counts. A tensor, or a value that `torch.as_tensor` accepts.

        Raises:
            InvalidRequest: it is not of that length, or not of numbers.
            Disagreement: it is not so on another rank.

        After an error: as for `load_state_dict`.
        """
        values = self._agreed("update_shards", lambda: self._divided(flat))
        self._runtime.masters.replace(self._new_values(lambda p: values[p.name].view(p.shape), {}))

    def _divided(self, flat: Any) -> dict[str, torch.Tensor]:
        """Return each parameter's part of a flat tensor, by name."""
        layout = self._wrapping.spec.layout
        try:
            flat = flat if isinstance(flat, torch.Tensor) else torch.as_tensor(flat, dtype=torch.float32, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest(
                f"update_shards() was given {reprlib.repr(flat)}; it needs one tensor of {layout.numel} numbers, all "
                f"parameters one after the other: {error}"
            ) from error
        if flat.shape != (layout.numel,):
            raise InvalidRequest(f"flat has shape {list(flat.shape)}; needed is [{layout.numel}], one per parameter")
        _check_value("flat", flat, torch.empty(layout.numel, dtype=torch.float32, device="meta"))
        values = torch.split(flat.detach(), [p.numel for _, p in layout.parameters()])
        return {p.name: value for (_, p), value in zip(layout.parameters(), values, strict=True)}

    def _new_values(
        self, value_of: Callable[[Parameter], torch.Tensor | None], old: Mapping[str, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield f32[unit_numel] of every unit."""
        for unit in self._wrapping.spec.layout.units:
            values = torch.empty(unit.numel, dtype=torch.float32, device="cpu")
            for spec in unit.parameters:
                value = value_of(spec)
                new = old[spec.name] if value is None else value.detach()
                values[spec.offset : spec.end].view(spec.shape).copy_(new)
            yield values

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> CheckpointInfo | None:
        """Write parameters and optimizer state; every worker calls it, and it returns when the checkpoint is complete.

        The format is the same for every strategy, so a job may go on with another one. With servers, they write the
        checkpoint, and all models of the job are in it. Under NO_SHARD the first worker writes it, which takes a second
        copy of parameters and state in its memory.

        Args:
            uri: directory or fsspec URI, which shard servers (NO_SHARD: the workers) reach.
            optimizer: the optimizer whose groups are saved, with all their keys; None = the hyperparameters of the
                newest step. Under NO_SHARD its moments are saved, too: it is ours, or one of torch.optim with a
                counterpart of ours; None = only parameters. With servers moments are theirs in any case.
            extra: JSON values to get back on load.
            state: your own state by name, that of the first worker: objects with `state_dict()` and
                `load_state_dict()` (schedulers), `torch.Generator`s, and plain values. Nothing is pickled; a function
                is not saved. That worker writes the state, so it must reach `uri`, too.
            rank_state: the same, of each worker: random generators (`RandomState`), the position of a loader. The
                names are the same on every worker.
            version: under NO_SHARD with torch's optimizer, the number of steps made; None = as in its state.

        Returns:
            The checkpoint that was written; None on workers that did not write.

        Raises:
            CheckpointError: it could not be written, on every worker. Nothing half-written counts as a checkpoint.
            InvalidRequest: a value of `state` has no safe form, one of `extra` is not JSON, or a worker's own state has
                more than 64 MiB.
        """
        given = dict(extra or {})
        if optimizer is not None:
            given[_GROUPS] = own_state.plain(optimizer.state_dict()["param_groups"])
        states = own_state.save(uri, self._wrapping.group, state, rank_state)
        written: list[CheckpointInfo | None] = []

        def write() -> None:
            written.append(self._runtime.save(uri, optimizer, given, states, version))

        self._runtime.masters.together("the checkpoint was not written, since that failed", write)
        return None if written[0] is None else _of_caller(written[0])

    def load_checkpoint(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Load parameters and optimizer state from a checkpoint of any strategy and world size; every worker calls it.

        Of a checkpoint of several models only this one is restored; `World.restore_checkpoint` takes all of them.

        Args:
            uri: the checkpoint, or a directory of checkpoints (of which the newest complete one is loaded).
            optimizer: as for `save_checkpoint`; its groups get the values that they had then, so that a scheduler goes
                on from there. None = no groups are touched.
            state: as for `save_checkpoint`, or less of it. Objects load their state, tensors are filled, other values
                are set in the mapping.
            rank_state: likewise, of the worker of this rank. If there are more workers than then, the objects of the
                new ones stay as they are, with a warning; the state of ranks that are gone is not loaded.

        Raises:
            CheckpointError: it cannot be read, on every worker.
            InvalidRequest: it was saved from another model, on every worker; or it lacks some of `state`.
        """
        info = self._runtime.load(uri, optimizer)
        self._follow_restores()
        if optimizer is not None:
            _set_groups(optimizer, info)
        own_state.load(info.uri, info.states, self._wrapping.group.rank, state, rank_state)
        return _of_caller(info)


def _set_groups(optimizer: torch.optim.Optimizer, info: CheckpointInfo) -> None:
    """Set an optimizer's groups from a checkpoint: all keys, or the hyperparameters of its newest step."""
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


def _of_caller(info: CheckpointInfo) -> CheckpointInfo:
    """Return the info with the caller's own part of `extra`."""
    return replace(info, extra={key: value for key, value in info.extra.items() if key != _GROUPS})


class _Fill(Uncopied):
    """The hook by which `state_dict()` of the user's module gives values, as long as there is a wrapper."""

    def __init__(self, wrapper: ShardedValues) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if (found := self._wrapper()) is not None:
            found._fill(state, prefix)


def _refuse_loading(path: str, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse values that torch loads into a part of a wrapped model; the entries that the wrapper loads have been taken
    out.

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


def _value_in(given: Mapping[str, Any], parameter: Parameter) -> torch.Tensor | None:
    """Return the value under one of a parameter's names; None if there is none."""
    return next((given[name] for name in (parameter.name, *parameter.aliases) if name in given), None)


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
        torch.empty(target.shape, dtype=target.dtype, device="cpu").copy_(value) if _is_special(value) else None
    except Exception as error:
        raise InvalidRequest(f"{made}, which cannot be copied: {error}; give a dense tensor") from error


def _is_special(value: torch.Tensor) -> bool:
    known = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return not known or value.layout is not torch.strided or value.is_quantized
