"""NO_SHARD: every worker has all parameters, and makes the steps itself.

Gradients are averaged between workers. The parameters that the optimizer updates, the *masters*, are in the dtype the
model was built with. The module computes with them, unless it computes in another dtype or on another device than
theirs. Then each unit is copied for its forward and for its backward. Between uses `param.data` is the master.

The buckets in which gradients are reduced (`parallel.rounds`) are the units, the last of the model first. One more
element per parameter counts the workers that have a gradient of it. If none has, its gradient stays None, and an
optimizer skips it as in plain torch.

Invariant: after a backward outside `no_sync()`, `param.grad` is the average over the workers, of the same bits on all.
No optimizer, torch's own included, makes a step of other gradients: the workers' models would diverge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_ps.collectives.objects import all_gather_object
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import Misuse
from axon_ps.parallel.compile import uncompiled
from axon_ps.parallel.ddp import replicas
from axon_ps.parallel.fsdp.abstract_runtime import LOAD_FAILED
from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit
from axon_ps.parallel.fsdp.masters import Masters
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.no_shard.local_optimizer import LocalOptimizer
from axon_ps.parallel.fsdp.no_shard.replicated_unit import ReplicatedUnit
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.parallel.fsdp.tensors.loss_scale import scale_of_backward
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.parallel.rounds import Round
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Hyper, OptimizerChange, OptimizerSpec, StepResult
from axon_ps.worker.checkpoints import CheckpointInfo, info_from_json, info_to_json


class LocalMasters(Masters):
    """The values of a model of which every worker of a group has all parameters.

    Args:
        group: the workers.
        flats: the units of this worker, in layout order.
    """

    def __init__(self, group: ProcessGroup, flats: Sequence[ReplicatedUnit]) -> None:
        self._group = group
        self._flats = flats

    def units(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        """See `Masters.units`."""
        return (self._flats[number].master.detach().to("cpu", torch.float32) for number in numbers)

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """See `Masters.replace`."""
        with torch.no_grad():
            for flat, value in zip(self._flats, values, strict=True):
                flat.master.copy_(value)
        self.broadcast()

    def broadcast(self) -> None:
        """Copy the first worker's values to every other."""
        replicas.broadcast(self._group, [flat.master for flat in self._flats])

    def gather(self, value: Any) -> list[Any]:
        """See `Masters.gather`."""
        return all_gather_object(value, self._group)


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
        self.masters: LocalMasters = LocalMasters(self._group, self._flats)
        self._trained = [f for f in reversed(self._flats) if f.trainable]  # in the order in which they are reduced
        self._round = self._new_round()
        self._version = 0
        self._optimizer: LocalOptimizer | None = None
        self._change: OptimizerChange | None = None  # with the next step
        self._clipped_norm: float | None = None
        self._averaged = False  # True if `param.grad` are averages
        self._has_local = False  # True if they have gradients in them that are this worker's alone

    @property
    def version(self) -> int:
        """Number of steps of our optimizer and of copies from other models. Loading a checkpoint sets it."""
        return self._version

    @property
    def now(self) -> Position:
        """See `Runtime.now`."""
        return 0, self._version

    # ------------------------------------------------------------------ gradients

    def _push(self, flat: FlatUnit) -> None:
        """Reduce a unit's gradient after those before it; see `parallel.rounds`."""
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
        given = flat.grads.pack(buffer[:numel], 1.0 / (self._group.world_size * self.loss_scale.value))
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
        """True if a parameter has a gradient."""
        return any(flat.grads.present for flat in self._trained)

    def zero_grad(self, *, set_to_none: bool, leaving: Iterable[nn.Parameter] = ()) -> bool:
        """See `Runtime.zero_grad`. Gradients are in `param.grad`, and torch's own `zero_grad` drops them there."""
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
            self.grad_meter.add(-flat.grads.staged_bytes)
            flat.grads.drop_staged()
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
        if self.accumulation.syncing:
            self._average()

    def _average(self) -> None:
        """Reduce the gradients that have not been reduced, and set all of them."""
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
        self.masters.broadcast()

    def copy_from(self, other: Self, weight: float) -> StepResult:
        """See `Runtime.copy_from`. The masters change alike on every worker."""
        with torch.no_grad():
            for mine, theirs in zip(self._flats, other._flats, strict=True):
                if not mine.unit.raw:
                    mine.master.mul_(1.0 - weight).add_(theirs.master.to(mine.master.device), alpha=weight)
                elif weight == 1.0:
                    mine.master.copy_(theirs.master)
        return self._made(0.0)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients now to a global L2 norm of at most `max_norm`; return the norm before."""
        self.sent.clip(max_norm)  # checks it
        params = [p for f in self._trained for p in f.params]
        self._clipped_norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
        return torch.tensor(self._clipped_norm, dtype=torch.float32, device="cpu")

    # ------------------------------------------------------------------ our optimizers

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """Run the kernels of the servers here.

        Raises:
            InvalidRequest: a hyperparameter is out of range, or a master is not f32 in host memory.
        """
        self._optimizer = LocalOptimizer(spec, self._flats)

    def change_optimizer(self, spec: OptimizerSpec, *, retains_moments: bool = False) -> None:
        """See `Runtime.change_optimizer`."""
        retains = retains_moments and (self._change is None or self._change.retains_moments)
        LocalOptimizer(spec, ())  # raises if it cannot be
        self._change = OptimizerChange(spec=spec, retains_moments=retains)

    def retain_moments(self) -> None:
        """See `Runtime.retain_moments`."""
        if self._change is not None:
            self._change = replace(self._change, retains_moments=True)

    @property
    def optimizer_change(self) -> OptimizerChange | None:
        """See `Runtime.optimizer_change`."""
        return self._change

    def _changed_optimizer(self) -> LocalOptimizer | None:
        """Return the optimizer that makes the next step, once it has replaced the one before."""
        change, self._change = self._change, None
        if change is not None:
            before = self._optimizer if change.retains_moments else None
            self._optimizer = LocalOptimizer(change.spec, self._flats, before)
            self.moments_of = self.moments_of if change.retains_moments else self._version
        return self._optimizer

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """See `Runtime.optimizer_state`. Until a new optimizer replaces the one before, the state is the old one's."""
        is_before = self._change is not None and not self._change.retains_moments
        is_current = self.current is not None and self.current() is optimizer
        return self._optimizer.states() if is_current != is_before and self._optimizer is not None else {}

    def load_optimizer_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """See `Runtime.load_optimizer_state`."""
        optimizer = self._changed_optimizer()
        assert optimizer is not None
        optimizer.load_states(state, hyper)

    def step(self, hyper: Sequence[Hyper], commit: Mapping[str, str]) -> StepResult:
        """Make one local step, the same on every worker. Skip it if a gradient is not finite, as the servers do."""
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
        self.one_version.at = self.now
        result = StepResult(committed=not why_not, version=self._version, grad_norm=norm, reason=why_not)
        return self.counters.counted(result)

    @property
    def optimizer_bytes(self) -> int | None:
        """See `Runtime.optimizer_bytes`."""
        return None if self._optimizer is None else self._optimizer.nbytes()

    # ------------------------------------------------------------------ checkpoints

    def save(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        states: Mapping[int, FileEntry],
        version: int | None,
    ) -> CheckpointInfo | None:
        """See `Runtime.save`. The first worker writes."""
        info = None
        if self._group.rank == 0:
            # imported here, since it loads the servers' kernels and their compiler
            from axon_ps.parallel.fsdp.no_shard import local_checkpoint

            moments = local_checkpoint.OptimizerMoments(self._ours_or(optimizer), self._flats)
            version = max(self._version, moments.version()) if version is None else version
            info = local_checkpoint.save(
                uri, self._wrapping.spec, self._flats, moments, extra, version, states, self.buffers
            )
        return info

    def load(self, uri: str, optimizer: torch.optim.Optimizer | None) -> CheckpointInfo:
        """See `Runtime.load`."""
        from axon_ps.parallel.fsdp.no_shard import local_checkpoint

        def read() -> dict[str, Any]:
            moments = local_checkpoint.OptimizerMoments(self._ours_or(optimizer), self._flats)
            spec, name = self._wrapping.spec, self._wrapping.name
            return info_to_json(local_checkpoint.load(uri, spec, self._flats, moments, name, self.buffers))

        info = info_from_json(self.masters.together(LOAD_FAILED, read)[self._group.rank])
        self._version = self.moments_of = info.version
        return info

    def _ours_or(self, optimizer: torch.optim.Optimizer | None) -> LocalOptimizer | torch.optim.Optimizer | None:
        return self._changed_optimizer() if optimizer in self.optimizers else optimizer


@uncompiled
def _check_averaged(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check the gradients before a step of any optimizer."""
    homes = (getattr(param, "_axon_home", None) for group in optimizer.param_groups for param in group["params"])
    for model in {home.model() for home in homes if home is not None}:
        runtime = getattr(model, "_runtime", None)
        if isinstance(runtime, ReplicatedRuntime):
            runtime.check_averaged()


register_optimizer_step_pre_hook(_check_averaged)
