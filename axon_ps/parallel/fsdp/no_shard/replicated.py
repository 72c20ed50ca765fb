"""NO_SHARD: every worker has all parameters; gradients are averaged between workers, and the step is local.

The parameters that the optimizer moves, the *masters*, are in the dtype the model was built with. They are what the
module computes with, unless it computes in another dtype or on another device than theirs: then each unit is
copied for its forward and for its backward, and between uses `param.data` is the master.

Note: [One order of reductions]
    Every worker reduces the units in one order, the last of the model first, whatever the order in which their
    gradients become complete; a unit waits for those before it, and what is left is reduced when backward ends. So a
    unit that one worker did not use cannot make workers disagree. One more element per unit counts the workers that
    have a gradient of it: when none has, its gradients stay None, and an optimizer skips it, as in plain torch.

Invariant: after a backward outside `no_sync()`, `param.grad` is the average over the workers, of the same bits on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.optim.registry import create
from axon_ps.parallel.dtypes import TORCH_DTYPES, scale_into
from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.runtime import ModuleUnit, Runtime
from axon_ps.parallel.fsdp.steps import Steps
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, StepResult
from axon_ps.worker.steps.ticket import Ticket


class ReplicatedUnit(FlatUnit):
    """One unit that every worker has all of.

    Args:
        master_device: of its masters; the rest is `FlatUnit`'s.

    Attributes:
        master: built_dtype[unit_numel]; what the optimizer moves.
    """

    sharded = False

    def __init__(self, *args: Any, master_device: torch.device, meter: Meter, **kwargs: Any) -> None:
        super().__init__(*args, meter=meter, resident=True, **kwargs)
        built = TORCH_DTYPES[self.unit.parameters[0].dtype]
        self.swapped = built != self.flat.dtype or master_device.type != self.flat.device.type
        self.stage_device = master_device
        self._master_grads: list[torch.Tensor | None] = [None] * len(self.params)
        self._is_copied = False
        if self.swapped:
            self.master = torch.zeros(self.unit.numel, dtype=built, device=master_device)
            meter.add(self.master.nbytes)
            self._sharded_data = [self.master[p.offset : p.end].view(p.shape) for p in self.unit.parameters]
            self._set_data(self._sharded_data)
        else:
            self._allocate()
            self.master = self.flat
            self._set_data(self._views)

    def remote(self, steps: Steps) -> bool:
        """Never: everything is here."""
        return False

    def is_current(self, steps: Steps) -> bool:
        """Whether the module can compute with it."""
        return self._is_copied or not self.swapped

    def start_gather(self, steps: Steps, pool: BufferPool) -> None:
        """Nothing is under way: `unshard` copies."""

    @property
    def gather_bytes(self) -> int:
        """Memory that a gather takes until `unshard`."""
        return 0

    @property
    def reshardable_bytes(self) -> int:
        """Memory that resharding frees."""
        return self.nbytes if self._is_copied else 0

    def unshard(self, steps: Steps, pool: BufferPool) -> None:
        """Copy the masters for use, if the module computes with a copy; gradients of the masters are put aside."""
        if self.is_current(steps):
            return
        self._allocate()
        with torch.no_grad():
            self.flat.copy_(self.master, non_blocking=True)
        for i, param in enumerate(self.params):
            self._master_grads[i], param.grad = param.grad, None
        self._set_data(self._views)
        self._is_copied = True

    def reshard(self, pool: BufferPool) -> None:
        """Free the copy."""
        if not self._is_copied:
            return
        self._is_copied = False
        self.stage_grads()  # a gradient that was not reduced is the copy's; none is left when it was
        self._set_data(self._sharded_data)
        self._storage.resize_(0)
        self._meter.add(-self._nbytes)
        for i, param in enumerate(self.params):
            param.grad, self._master_grads[i] = self._master_grads[i], None

    def set_grads(self, average: torch.Tensor) -> None:
        """Set the gradients to views of `average`, wire[unit_numel], in the masters' dtype, plus those there were."""
        average = average.to(self.master.device, self.master.dtype)
        for spec, param in zip(self.unit.parameters, self.params, strict=True):
            grad = average[spec.offset : spec.end].view(spec.shape)
            param.grad = grad if param.grad is None else param.grad + grad


class _LocalView:
    """The version of a model whose parameters are all local."""

    epoch = asked_epoch = copied = version = 0

    @property
    def latest(self) -> tuple[int, int]:
        return self.epoch, self.version

    @property
    def job(self) -> _LocalView:
        return self

    def wait_complete(self) -> None:
        """There is nobody to wait for."""


class _Local:
    """The `Steps` of a model whose parameters are all local."""

    def __init__(self) -> None:
        self.view = _LocalView()

    @property
    def parameters(self) -> _Local:
        return self

    @property
    def gradients(self) -> _Local:
        return self

    def gather(self, unit: int, out: Array) -> Any:
        raise AssertionError("nothing is gathered under NO_SHARD")

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        raise AssertionError("an optimizer is local under NO_SHARD")

    def ticket(self, began: tuple[int, int] | None = None) -> Ticket:
        raise AssertionError("there are no tickets under NO_SHARD")

    def push(self, *_: Any) -> Any:
        raise AssertionError("nothing is pushed under NO_SHARD")

    def vote(self, *_: Any, **__: Any) -> Decision:
        raise AssertionError("there are no votes under NO_SHARD")


class ReplicatedRuntime(Runtime):
    """`Runtime` for a model of which every worker of a group has all parameters.

    Args:
        group: whose workers average their gradients.
        units: module units, of `ReplicatedUnit`s.
        grad_wire: what gradients travel as.
        meter: counts the bytes of parameters.
    """

    def __init__(self, group: ProcessGroup, units: Sequence[ModuleUnit], *, grad_wire: DType, meter: Meter) -> None:
        self._local = _Local()
        super().__init__(self._local, units, grad_wire=grad_wire, meter=meter, pinned=False, prefetch=False)
        self._group = group
        self._launch_order = [u.trainable for u in reversed(self.units) if u.trainable is not None]
        self._ready: set[int] = set()
        self._reducing: list[tuple[ReplicatedUnit, Any, torch.Tensor]] = []
        self._optimizer: LocalOptimizer | None = None
        self._clipped_norm: float | None = None

    @property
    def flats(self) -> list[ReplicatedUnit]:
        """Its units, in layout order."""
        flats = [f for u in self.units for f in u.flats if isinstance(f, ReplicatedUnit)]
        return sorted(flats, key=lambda f: f.index)

    @property
    def version(self) -> int:
        """Steps of our optimizer."""
        return self._local.view.version

    # ------------------------------------------------------------------ gradients

    def _push(self, flat: FlatUnit) -> None:
        """See Note: [One order of reductions]."""
        self._ready.add(flat.index)
        while len(self._reducing) < len(self._launch_order):
            following = self._launch_order[len(self._reducing)]
            if following.index not in self._ready:
                return
            self._reduce(following)

    def _reduce(self, flat: FlatUnit) -> None:
        assert isinstance(flat, ReplicatedUnit)
        dtype = TORCH_DTYPES[self._grad_wire]
        buffer = torch.empty(flat.unit.numel + 1, dtype=dtype, device=flat.flat.device)
        scale = 1.0 / (self._group.world_size * self.grad_scale)
        buffer[-1] = float(flat.has_grads)
        with torch.no_grad():
            for spec, grad in zip(flat.unit.parameters, flat.pop_grads(), strict=True):
                scale_into(buffer[spec.offset : spec.end].view(spec.shape), grad, scale)
        self.counters.pushed_bytes += buffer.nbytes
        self._grad_meter.add(buffer.nbytes)
        self._reducing.append((flat, self._group.all_reduce(buffer, async_op=True), buffer))

    def _after_backward(self) -> None:
        super()._after_backward()
        if self.syncing:
            self._finish_reductions()

    def _finish_reductions(self) -> None:
        for flat in self._launch_order[len(self._reducing) :]:
            self._reduce(flat)
        reducing, self._reducing = self._reducing, []
        self._ready.clear()
        for flat, work, buffer in reducing:
            work.wait()
            if float(buffer[-1]):
                flat.set_grads(buffer[:-1])
            self._grad_meter.add(-buffer.nbytes)

    def push_accumulated(self) -> None:
        """Average the gradients accumulated inside `no_sync()`."""
        if any(f.has_grads for f in self._launch_order):
            self._finish_reductions()

    def broadcast(self) -> None:
        """Copy the first worker's masters to every other."""
        for flat in self.flats:
            self._group.broadcast(flat.master)

    def mix(self, other: ReplicatedRuntime, weight: float) -> StepResult:
        """Move the masters towards another model's, the same on every worker; counted as a step."""
        with torch.no_grad():
            for mine, theirs in zip(self.flats, other.flats, strict=True):
                mine.master.mul_(1.0 - weight).add_(theirs.master.to(mine.master.device), alpha=weight)
        self._local.view.version += 1
        self.counters.steps_committed += 1
        return StepResult(committed=True, version=self.version, grad_norm=0.0)

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to a global L2 norm now; the norm before."""
        params = [p for f in self._launch_order for p in f.params]
        norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
        self._clipped_norm = norm
        return norm

    # ------------------------------------------------------------------ our optimizers

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """Run the kernels of the servers here.

        Raises:
            InvalidRequest: a master is not f32 in host memory.
        """
        self._optimizer = LocalOptimizer(spec, self.flats)

    def step(self, hyper: Sequence[Hyper]) -> StepResult:
        """One local step; skipped when a gradient is not finite, as the servers skip it. Equal on every worker."""
        if self._optimizer is None:
            raise Misuse("no optimizer of axon_ps was made for this model")
        grads = [p.grad for f in self._launch_order for p in f.params if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        norm, self._clipped_norm = (norm if self._clipped_norm is None else self._clipped_norm), None
        if not math.isfinite(norm):
            self.counters.steps_not_committed += 1
            return StepResult(
                committed=False, version=self.version, grad_norm=norm, reason="the gradients are not finite"
            )
        self._optimizer.apply(hyper)
        for p in (p for f in self._launch_order for p in f.params):
            p.grad = None
        self._local.view.version += 1
        self.counters.steps_committed += 1
        return StepResult(committed=True, version=self.version, grad_norm=norm)

    @property
    def optimizer(self) -> LocalOptimizer | None:
        """Our optimizer, if the model has one."""
        return self._optimizer

    def restored(self, version: int) -> None:
        """The masters were replaced by those of a checkpoint."""
        self._local.view.version = version


class LocalOptimizer:
    """The servers' kernels on masters in this process: moments in host memory.

    Args:
        spec: optimizer and groups.
        flats: every unit, in layout order.

    Attributes:
        spec: optimizer and groups.
        state: per trainable unit, moments by name, f32[unit_numel].
        updates: per trainable unit, per parameter, how many updates it had.
    """

    def __init__(self, spec: OptimizerSpec, flats: Sequence[ReplicatedUnit]) -> None:
        self.spec = spec
        self._kernels = create(spec.name)
        groups = tuple(self._kernels.validate(g) for g in spec.groups)
        self._flats = [f for f in flats if f.trainable]
        first = dict(zip((f.index for f in flats), _running(len(f.params) for f in flats), strict=True))
        self._group_of = {f.index: spec.group_of[first[f.index] : first[f.index] + len(f.params)] for f in self._flats}
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.updates: dict[int, list[int]] = {}
        for flat in self._flats:
            if flat.master.dtype != torch.float32 or flat.master.device.type != "cpu":
                raise InvalidRequest(
                    f"unit {flat.unit.name!r} has masters of {flat.master.dtype} on {flat.master.device}; this "
                    "optimizer runs in host memory on f32: build the model in f32 with "
                    "cpu_offload=CPUOffload.OPTIMIZER_STATES, or use an optimizer of torch.optim"
                )
            self.state[flat.index] = {
                name: torch.full((flat.unit.numel,), self._kernels.initial_state(name, groups))
                for name in self._kernels.state_names(groups)
            }
            self.updates[flat.index] = [0] * len(flat.params)

    def apply(self, hyper: Sequence[Hyper]) -> None:
        """Move every parameter that has a gradient."""
        for flat in self._flats:
            master = _f32(flat.master)
            states = {name: _f32(s) for name, s in self.state[flat.index].items()}
            for i, (spec, param) in enumerate(zip(flat.unit.parameters, flat.params, strict=True)):
                if param.grad is None:
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


def _running(counts: Any) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts
