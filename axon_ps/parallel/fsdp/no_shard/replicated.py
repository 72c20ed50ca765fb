"""NO_SHARD: every worker has all parameters; gradients are averaged between workers, and the step is local.

The parameters that the optimizer moves, the *masters*, are in the dtype the model was built with. They are what the
module computes with, unless it computes in another dtype or on another device than theirs: then each unit is
copied for its forward and for its backward, and between uses `param.data` is the master.

The buckets in which gradients are reduced (`parallel.rounds`) are the units, the last of the model first. One more
element per parameter counts the workers that have a gradient of it: when none has, its gradient stays None, and an
optimizer skips it, as in plain torch.

Invariant: after a backward outside `no_sync()`, `param.grad` is the average over the workers, of the same bits on all.
No optimizer, torch's own neither, makes a step of other gradients: the workers' models would part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_ps.collectives.objects import all_gather_object
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.optim.registry import create
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.ddp import replicas
from axon_ps.parallel.dtypes import TORCH_DTYPES
from axon_ps.parallel.fsdp.abstract_runtime import LOAD_FAILED
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit, UnitState
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.sources import ParameterSource, PendingGather
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.parallel.fsdp.strategy import CPUOffload
from axon_ps.parallel.fsdp.tensors.loss_scale import scale_of_backward
from axon_ps.parallel.fsdp.wrap import WrappedUnit, Wrapping
from axon_ps.parallel.rounds import Round
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Array, DType, Hyper, OptimizerChange, OptimizerSpec, StepResult
from axon_ps.worker.checkpoints import CheckpointInfo, info_from_json, info_to_json

_ALWAYS: Position = (0, 0)
"""What the values of a unit are of that is always current."""


class LocalSource(ParameterSource):
    """The values are the unit's masters, which are always current."""

    def __init__(self, master: torch.Tensor) -> None:
        """`master` has the values. There are no steps that a version could be of."""
        self._master = master

    def wanted(self, flat: FlatUnit) -> Position:
        return _ALWAYS

    def is_remote(self, at: Position) -> bool:
        return False

    def gather_bytes(self, flat: FlatUnit) -> int:
        return 0

    def start(self, flat: FlatUnit, at: Position) -> PendingGather:
        return PendingGather(at)

    def finish(self, flat: FlatUnit, pending: PendingGather, result: Any) -> bool:
        flat.fill(self._master, non_blocking=True)
        return True


class ReplicatedUnit(FlatUnit):
    """One unit that every worker has all of.

    Args:
        rest: as for `FlatUnit`.

    Note: [Values that the user sets]
        Parameters are views of the masters, so what is written into one in place is in the master. `param.data = t`
        (`vector_to_parameters` does so) gives a parameter memory of its own. Before anything reads or moves the values
        they are copied into the master, and the parameter is its view again: optimizer, `state_dict` and forward always
        have the same.
    """

    sharded = False

    def __init__(self, index: int, wrapped: WrappedUnit, wrapping: Wrapping) -> None:
        unit, device = wrapped.unit, wrapping.device
        master_device = device if wrapping.offload is CPUOffload.NONE else torch.device("cpu")
        built = TORCH_DTYPES[unit.parameters[0].dtype]
        self.swapped = built != wrapping.compute_of(unit) or master_device.type != device.type
        self._master = torch.zeros(unit.numel if self.swapped else 0, dtype=built, device=master_device)
        super().__init__(index, wrapped, LocalSource(self._master), wrapping, resident=not self.swapped)
        self.stage_device = master_device
        self._master_grads: list[torch.Tensor | None] = [None] * len(self.params)
        if self.swapped:
            wrapping.meter.add(self._master.nbytes)
            self._sharded_data = [self._master[p.offset : p.end].view(p.shape) for p in self.unit.parameters]
            self._set_data(self._sharded_data)
            self._set_readable(False)  # what is written between uses is written to the masters
        else:
            self.allocate()
            self._master = self.flat
            self._set_data(self._views)
            self.state, self.values_at = UnitState.UNSHARDED, _ALWAYS

    @property
    def master(self) -> torch.Tensor:
        """built_dtype[unit_numel]; what the optimizer moves. See Note: [Values that the user sets]."""
        self.take_over()
        return self._master

    def take_over(self) -> None:
        """Take over the values of parameters that have memory of their own.

        Raises:
            InvalidRequest: a parameter was given a tensor of another shape, dtype or device.
        """
        views = self._views if self.state.has_values else self._sharded_data
        for spec, param, view in zip(self.unit.parameters, self.params, views, strict=True):
            if param.data_ptr() == view.data_ptr() and param.shape == view.shape and param.stride() == view.stride():
                continue
            given = param.data
            if (given.shape, given.dtype, given.device) != (view.shape, view.dtype, view.device):
                raise InvalidRequest(
                    f"the data of parameter {spec.name!r} was set to {given.dtype}{list(given.shape)} on "
                    f"{given.device}; a wrapped parameter stays {view.dtype}{list(view.shape)} on {view.device}"
                )
            view.copy_(given)
            if self.swapped and self.state.has_values:
                self._master[spec.offset : spec.end].view(spec.shape).copy_(given)
            param.data = view

    def unshard(self) -> None:
        """Copy the masters for use, if the module computes with a copy; gradients of the masters are put aside."""
        self.take_over()
        if self.is_current:
            return
        for i, param in enumerate(self.params):
            self._master_grads[i], param.grad = param.grad, None
        super().unshard()

    def reshard(self) -> None:
        """Free the copy."""
        self.take_over()
        if self.resident or not self.state.has_values:
            self.abandon()
            return
        self.stage_grads()  # a gradient that was not reduced is the copy's; none is left when it was
        super().reshard()
        for i, param in enumerate(self.params):
            param.grad, self._master_grads[i] = self._master_grads[i], None

    def set_grads(self, reduced: torch.Tensor) -> None:
        """Set the gradients to what was reduced, in the masters' dtype, plus those there were.

        Args:
            reduced: wire[unit_numel + parameters]: the average, and how many workers have a gradient of each.
        """
        average = reduced[: self.unit.numel].to(self.master.device, self.master.dtype)
        counts = reduced[self.unit.numel :].tolist()
        for spec, param, count in zip(self.unit.parameters, self.params, counts, strict=True):
            if not count:
                continue
            grad = average[spec.offset : spec.end].view(spec.shape)
            param.grad = grad if param.grad is None else param.grad + grad


class ReplicatedRuntime(Runtime):
    """`Runtime` for a model of which every worker of a group has all parameters.

    Args:
        wrapping: as for `Runtime`; its group's workers average their gradients.
        units: as for `Runtime`.
        flats: their units, in layout order.
    """

    def __init__(self, wrapping: Wrapping, units: Sequence[ModuleUnit], flats: Sequence[ReplicatedUnit]) -> None:
        super().__init__(wrapping, units, BufferPool(0, wrapping.meter))
        self._group = wrapping.group
        self._flats = tuple(flats)
        self._trained = [f for f in reversed(self._flats) if f.trainable]  # in the order in which they are reduced
        self._round = self._new_round()
        self._version = 0
        self._optimizer: LocalOptimizer | None = None
        self._change: OptimizerChange | None = None  # with the next step
        self._clipped_norm: float | None = None
        self._averaged = False  # `param.grad` are averages
        self._has_local = False  # or have gradients in them that are this worker's alone

    @property
    def version(self) -> int:
        """Steps of our optimizer."""
        return self._version

    @property
    def now(self) -> Position:
        """See `Runtime.now`."""
        return 0, self._version

    # ------------------------------------------------------------------ gradients

    def _push(self, flat: FlatUnit) -> None:
        """Reduce it when it is its turn; see `parallel.rounds`."""
        if flat.index not in self._round.missing:
            raise Misuse(
                f"unit {flat.unit.name!r} got its gradient twice: it is used inside checkpoint(use_reentrant=True), "
                "which makes a backward of each use (pass use_reentrant=False), or the last backward was broken off by "
                "an error while gradients were on their way to the other workers, and the model must be built again"
            )
        self._round.ready(flat.index)

    def _new_round(self) -> Round:
        return Round([(flat.index,) for flat in self._trained], self._reduce)

    def _reduce(self, position: int) -> Work[Any]:
        flat = self._trained[position]
        wire = TORCH_DTYPES[self._wrapping.spec.precision.grad]
        numel = flat.unit.numel
        buffer = torch.empty(numel + len(flat.params), dtype=wire, device=flat.flat.device)
        given = flat.pack_grads(buffer[:numel], 1.0 / (self._group.world_size * self.loss_scale.value))
        buffer[numel:] = torch.tensor(given, dtype=wire, device="cpu")
        self.counters.pushed_bytes += buffer.nbytes
        self.grad_meter.add(buffer.nbytes)
        work: Work[Any] = self._group.all_reduce(buffer, async_op=True)
        return work

    def _begin_backward(self) -> None:
        if not self._callback_queued and scale_of_backward() != 1.0 and self._averaged and self.has_grads:
            raise Misuse(
                "the gradients of the step before were not dropped, and the scaled ones of this backward would be "
                "added to them: call optimizer.zero_grad() in each step"
            )
        super()._begin_backward()

    @property
    def has_grads(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(flat.has_grads for flat in self._trained)

    def zero_grad(self, *, set_to_none: bool, leaving: Iterable[nn.Parameter] = ()) -> bool:
        """See `Runtime.zero_grad`; gradients are in `param.grad`, where torch drops them."""
        self._settle_backward()
        if self._sums_batches:
            return False
        if self._broken and self._group.size > 1:
            raise Misuse(
                "the last backward was broken off by an error while gradients were on their way to the other workers, "
                "and under NO_SHARD they cannot be withdrawn: build the model again, on every worker"
            )
        if self._broken:
            finished, self._round = self._round, self._new_round()
            self.grad_meter.add(-sum(buffer.nbytes for buffer in finished.results()))
        for flat in self.flats:
            self.grad_meter.add(-flat.staged_bytes)
            flat.drop_staged()
            self.sent.drop(flat.index)
        self._broken = self.has_gradients = self._averaged = self._has_local = False
        return True

    @property
    def _is_partial(self) -> bool:
        """See `Runtime._is_partial`."""
        return self._round.has_begun

    def _after_backward(self) -> None:
        super()._after_backward()
        self._has_local = self._group.size > 1
        if self.syncing:
            self._average()

    def _average(self) -> None:
        """Reduce what has not been reduced, and set the gradients."""
        for index in list(self._round.missing):
            self._round.ready(index)
        finished, self._round = self._round, self._new_round()
        for flat, buffer in zip(self._trained, finished.results(), strict=True):
            flat.set_grads(buffer)
            self.grad_meter.add(-buffer.nbytes)
        self._averaged, self._has_local = True, False
        self.loss_scale.divided()

    def check_averaged(self) -> None:
        """Raise before a step of gradients that are this worker's alone.

        Raises:
            Misuse: there are some.
        """
        if self._has_local and self.has_grads:
            raise Misuse(
                "every backward of this step was inside no_sync(), so that its gradients are this worker's alone: "
                "leave the last one outside, or call model.sync_gradients() before the step, on every worker"
            )

    def push_accumulated(self) -> None:
        """Average the gradients accumulated inside `no_sync()`."""
        if self.has_grads:
            self._average()

    def refresh(self) -> None:
        """Copy the first worker's masters to every other."""
        replicas.broadcast(self._group, [flat.master for flat in self._flats])

    def copy_from(self, other: Self, weight: float) -> StepResult:
        """See `Runtime.copy_from`: the masters move, the same on every worker."""
        with torch.no_grad():
            for mine, theirs in zip(self._flats, other._flats, strict=True):
                mine.master.mul_(1.0 - weight).add_(theirs.master.to(mine.master.device), alpha=weight)
        return self._made(0.0)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients to a global L2 norm now; the norm before."""
        self.sent.clip(max_norm)  # checks it
        params = [p for f in self._trained for p in f.params]
        self._clipped_norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
        return torch.tensor(self._clipped_norm, dtype=torch.float32, device="cpu")

    # ------------------------------------------------------------------ our optimizers

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """Run the kernels of the servers here.

        Raises:
            InvalidRequest: a master is not f32 in host memory.
        """
        self._optimizer = LocalOptimizer(spec, self._flats)

    def change_optimizer(self, spec: OptimizerSpec, *, retains_moments: bool = False) -> None:
        """See `Runtime.change_optimizer`."""
        retains = retains_moments and (self._change is None or self._change.retains_moments)
        LocalOptimizer(spec, ())  # whether it can be
        self._change = OptimizerChange(spec=spec, retains_moments=retains)

    def retain_moments(self) -> None:
        """See `Runtime.retain_moments`."""
        if self._change is not None:
            self._change = replace(self._change, retains_moments=True)

    @property
    def changes_optimizer(self) -> bool:
        """See `Runtime.changes_optimizer`."""
        return self._change is not None

    def _changed_optimizer(self) -> LocalOptimizer | None:
        """The optimizer that makes the next step, once it has taken the place of the one before."""
        change, self._change = self._change, None
        if change is not None:
            before = self._optimizer if change.retains_moments else None
            self._optimizer = LocalOptimizer(change.spec, self._flats, before)
            self.moments_of = self.moments_of if change.retains_moments else self._version
        return self._optimizer

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """See `Runtime.optimizer_state`; until another has taken its place it is that of the one before."""
        is_before = self._change is not None and not self._change.retains_moments
        is_current = self.current is not None and self.current() is optimizer
        return self._optimizer.states() if is_current != is_before and self._optimizer is not None else {}

    def load_optimizer_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """See `Runtime.load_optimizer_state`."""
        optimizer = self._changed_optimizer()
        assert optimizer is not None
        optimizer.load_states(state, hyper)

    def step(self, hyper: Sequence[Hyper], commit: Mapping[str, str]) -> StepResult:
        """One local step; skipped when a gradient is not finite, as the servers skip it. Equal on every worker."""
        if commit:
            raise Misuse("under NO_SHARD steps are local, so nothing can be committed with one; save it in checkpoints")
        optimizer = self._changed_optimizer()
        if optimizer is None:
            raise Misuse("no optimizer of axon_ps was made for this model")
        grads = [p.grad for f in self._trained for p in f.params if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        norm, self._clipped_norm = (norm if self._clipped_norm is None else self._clipped_norm), None
        if not math.isfinite(norm):
            return self._made(norm, why_not="the gradients are not finite")
        optimizer.apply(hyper)
        self.has_gradients = False
        return self._made(norm)

    def _made(self, norm: float, why_not: str = "") -> StepResult:
        self._version += not why_not
        self._read = self.now
        result = StepResult(committed=not why_not, version=self._version, grad_norm=norm, reason=why_not)
        return self.counters.counted(result)

    @property
    def optimizer_bytes(self) -> int | None:
        """See `Runtime.optimizer_bytes`."""
        return None if self._optimizer is None else self._optimizer.nbytes()

    # ------------------------------------------------------------------ the masters

    def masters(self) -> Iterator[torch.Tensor]:
        """See `Runtime.masters`."""
        return (flat.master.detach().to("cpu", torch.float32) for flat in self._flats)

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """See `Runtime.replace`."""
        with torch.no_grad():
            for flat, value in zip(self._flats, values, strict=True):
                flat.master.copy_(value)
        self.refresh()

    def gather(self, value: Any) -> list[Any]:
        """See `Runtime.gather`."""
        return all_gather_object(value, self._group)

    def save(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        states: Mapping[int, FileEntry],
        version: int | None,
    ) -> CheckpointInfo | None:
        """See `Runtime.save`; the first worker writes."""
        info = None
        if self._group.rank == 0:
            # it computes as servers do, which loads a compiler
            from axon_ps.parallel.fsdp.no_shard import local_checkpoint

            moments = local_checkpoint.Moments(self._ours_or(optimizer), self._flats)
            version = max(self._version, moments.version()) if version is None else version
            info = local_checkpoint.save(
                uri, self._wrapping.spec, self._flats, moments, extra, version, states, self.buffers
            )
        return info

    def load(self, uri: str, optimizer: torch.optim.Optimizer | None) -> CheckpointInfo:
        """See `Runtime.load`."""
        from axon_ps.parallel.fsdp.no_shard import local_checkpoint

        def read() -> dict[str, Any]:
            moments = local_checkpoint.Moments(self._ours_or(optimizer), self._flats)
            spec, name = self._wrapping.spec, self._wrapping.name
            return info_to_json(local_checkpoint.load(uri, spec, self._flats, moments, name, self.buffers))

        info = info_from_json(self.together(LOAD_FAILED, read)[self._group.rank])
        self._version = self.moments_of = info.version
        return info

    def _ours_or(self, optimizer: torch.optim.Optimizer | None) -> LocalOptimizer | torch.optim.Optimizer | None:
        return self._changed_optimizer() if optimizer in self.optimizers else optimizer


@uncompiled
def _check_averaged(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of any optimizer."""
    homes = (getattr(param, "_axon_home", None) for group in optimizer.param_groups for param in group["params"])
    for model in {home.model() for home in homes if home is not None}:
        runtime = getattr(model, "_runtime", None)
        if isinstance(runtime, ReplicatedRuntime):
            runtime.check_averaged()


register_optimizer_step_pre_hook(_check_averaged)


class LocalOptimizer:
    """The servers' kernels on masters in this process: moments in host memory.

    Args:
        spec: optimizer and groups.
        flats: every unit, in layout order.
        before: the optimizer with whose moments it goes on, if they are of the same kind.

    Attributes:
        spec: optimizer, and groups with the hyperparameters of the newest step.
        state: per trainable unit, moments by name, f32[unit_numel].
        updates: per trainable unit, per parameter, how many updates it had.
    """

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[ReplicatedUnit], before: LocalOptimizer | None = None
    ) -> None:
        self.spec = spec
        self._kernels = create(spec.name)
        self._needed = tuple(self._kernels.validate(g) for g in (*spec.groups, *spec.moments))
        self._flats = [f for f in flats if f.trainable]
        group_of = iter(spec.group_of)
        self._group_of = {f.index: tuple(islice(group_of, len(f.params))) for f in flats}
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.updates: dict[int, list[int]] = {}
        for flat in self._flats:
            if flat.master.dtype != torch.float32 or flat.master.device.type != "cpu":
                raise InvalidRequest(
                    f"unit {flat.unit.name!r} has masters of {flat.master.dtype} on {flat.master.device}; this "
                    "optimizer runs in host memory on f32: build the model in f32 with "
                    "cpu_offload=CPUOffload.OPTIMIZER_STATES, or use an optimizer of torch.optim"
                )
            self.updates[flat.index] = [0] * len(flat.params)
        if before is not None and before.spec.name == spec.name:
            self.updates.update(before.updates)
            self.state.update(before.state)
            self._needed += before._needed
        self._make_moments()

    def need(self, hyper: Sequence[Hyper]) -> None:
        """Make the moments that steps with these hyperparameters need."""
        names = self._kernels.state_names
        if names((*self._needed, *hyper)) != names(self._needed):
            self._needed = (*self._needed, *map(dict, hyper))
            self._make_moments()

    def _make_moments(self) -> None:
        names = self._kernels.state_names(self._needed)
        for flat in self._flats:
            there = self.state.get(flat.index, {})
            self.state[flat.index] = {
                name: there[name]
                if name in there
                else torch.full(
                    (flat.unit.numel,),
                    self._kernels.initial_state(name, self._needed),
                    dtype=torch.float32,
                    device="cpu",
                )
                for name in names
            }

    def _parameters(self) -> Iterator[tuple[ReplicatedUnit, int, torch.Tensor, slice]]:
        for flat in self._flats:
            for i, (spec, param) in enumerate(zip(flat.unit.parameters, flat.params, strict=True)):
                yield flat, i, param, slice(spec.offset, spec.end)

    def states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """By parameter that was updated, the state as torch's optimizers have it: the same memory."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for flat, i, param, elements in self._parameters():
            if self.updates[flat.index][i] and self._group_of[flat.index][i] >= 0:
                found[param] = {name: s[elements].view(param.shape) for name, s in self.state[flat.index].items()}
                found[param]["step"] = torch.tensor(
                    float(self.updates[flat.index][i]), dtype=torch.float32, device="cpu"
                )
        return found

    def load_states(self, states: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """Set what `states` gives, or an optimizer of torch has; parameters that it lacks begin anew.

        Raises:
            InvalidRequest: it has what this optimizer has not.
        """
        self.need(hyper)
        for flat, i, param, elements in self._parameters():
            given = {name: value for name, value in states.get(param, {}).items() if value is not None}
            count = given.pop("step", 1.0 if given else 0.0)
            if unknown := sorted(given.keys() - self.state[flat.index].keys()):
                raise InvalidRequest(
                    f"the state dict has {unknown[0]!r} of a parameter, which {self.spec.name} with these "
                    "hyperparameters has not; load the state dict of an optimizer of the same type"
                )
            self.updates[flat.index][i] = int(count)
            for name, array in self.state[flat.index].items():
                if name in given:
                    array[elements].view(param.shape).copy_(given[name])
                else:
                    array[elements].fill_(self._kernels.initial_state(name, self._needed))

    def apply(self, hyper: Sequence[Hyper]) -> None:
        """Move every parameter that has a gradient."""
        self.need(hyper)
        self.spec = replace(self.spec, groups=tuple(hyper), moments=self._needed)
        for flat in self._flats:
            master = _f32(flat.master)
            states = {name: _f32(s) for name, s in self.state[flat.index].items()}
            for i, (spec, param) in enumerate(zip(flat.unit.parameters, flat.params, strict=True)):
                if param.grad is None or self._group_of[flat.index][i] < 0:
                    continue
                elements = slice(spec.offset, spec.end)
                self.updates[flat.index][i] += 1
                self._kernels.apply(
                    master[elements],
                    _f32(param.grad.reshape(-1)),
                    tuple(s[elements] for s in states.values()),
                    None,
                    DType.F32,
                    hyper[self._group_of[flat.index][i]],
                    self.updates[flat.index][i],
                    1.0,
                )

    def nbytes(self) -> int:
        """Memory of the moments."""
        return sum(s.nbytes for states in self.state.values() for s in states.values())


def _f32(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().contiguous().numpy()
    assert array.dtype == np.float32
    return array
