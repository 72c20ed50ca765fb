"""Local SGD and DiLoCo: train on a copy for H steps, then let the servers move everybody by the average progress.

    outer step t, on every worker w:
        local_w = parameters_t
        H times:  local_w = inner_optimizer(local_w, gradient on a batch of w's)
        push      parameters_t - local_w                     the pseudo-gradient
    on the servers:
        parameters_{t+1} = outer_optimizer(parameters_t, average of the pseudo-gradients)

The push is an ordinary synchronous step with another meaning of gradient, so deaths, joins, exactly-once and
checkpoints are those of every step. Sources: Stich 2019 (local SGD); Douillard et al. 2023 (DiLoCo: AdamW inside, SGD
with Nesterov momentum outside).

Owns: the copy at the last sync (f32, on the host) and how many inner steps were made since. Refuses to touch the inner
optimizer's state, which is this worker's own, and buffers (running statistics), which nobody averages.

Invariant: `_anchor` has the servers' values at `_synced`, (epoch, version), in the parameters' dtype; the parameters
are that plus the local progress.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, StepAborted
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.dtypes import TORCH_DTYPES, dtype_from_torch
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import LocalSteps
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType, Hyper, OptimizerSpec, Outcome, StepResult
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.world import World, world_of

_BUFFERS = 2
"""Limit of the push buffers, in units of the largest one."""


class DiLoCo:
    """Train a plain module with a plain optimizer, and synchronize with the other workers every `inner_steps` steps.

    The module stays the user's: no hooks, every parameter in memory. Every worker must build the same module; its
    values become those of the servers. A worker that joins later begins with the servers' values. Buffers are
    each worker's own.

    Args:
        model: the module; not on the meta device.
        inner_optimizer: any torch optimizer of its parameters. Its state is this worker's own and is never sent.
        group: the workers that train it: a world, or its default group; None = the current world.
        inner_steps: local steps between two outer steps, H.
        outer_lr: learning rate of the outer SGD.
        outer_momentum: its momentum; 0 with `outer_lr=1` and `nesterov=False` is plain averaging (local SGD).
        nesterov: whether that momentum is Nesterov's.
        wire_dtype: what pseudo-gradients travel as; parameters travel as f32.
        unit_types: module classes that travel as units of their own; the rest of the module is one unit.
        plan_options: how finely units are cut.
        name: as for `FullyShardedDataParallel`.

    Attributes:
        outer_lr: of the coming outer step; the same on every worker.
        name: what the job calls the model.

    Raises:
        LayoutMismatch: another worker registered another module, `inner_steps` or outer optimizer.
        InvalidRequest: the module cannot be divided into units, or a setting is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        group: ProcessGroup | World | None = None,
        *,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        wire_dtype: torch.dtype = torch.float32,
        unit_types: Collection[type[nn.Module]] = (),
        plan_options: PlanOptions | None = None,
        name: str | None = None,
    ) -> None:
        policy, group = LocalSteps(inner_steps=inner_steps), current_group(group)
        if nesterov and not outer_momentum:
            raise InvalidRequest(
                f"outer_momentum is {outer_momentum}, and Nesterov's momentum (nesterov=True) needs one above 0; for "
                "plain averaging give outer_momentum=0, nesterov=False"
            )
        if len(group.ranks) != (world_size := world_of(group).world_size):
            raise InvalidRequest(
                f"the group has {len(group.ranks)} of the world's {world_size} workers; all of them "
                "take part in an outer step, pass world.default_group"
            )
        if meta := [name for name, p in model.named_parameters() if p.is_meta]:
            raise InvalidRequest(f"parameter {meta[0]!r} is on the meta device; build the module on the CPU or a GPU")
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.inner_steps = inner_steps
        self.outer_lr = outer_lr
        self._outer = {"momentum": outer_momentum, "nesterov": float(nesterov)}
        self._group = group
        self._wire = dtype_from_torch(wire_dtype, "wire_dtype")
        kinds = tuple(unit_types)
        self._wrapped_units = wrap.partition(model, lambda child: isinstance(child, kinds))
        self._spec = JobSpec(
            layout=wrap.layout_of(self._wrapped_units),
            precision=WirePrecision(param=DType.F32, grad=self._wire),
            options=plan_options or PlanOptions(),
            policy=policy,
            model=type(model).__qualname__,
        )
        pinned = any(p.device.type == "cuda" for wrapped in self._wrapped_units for p in wrapped.params)
        most_numel = max(wrapped.unit.numel for wrapped in self._wrapped_units)
        self._meter = Meter()
        self._out = BufferPool(_BUFFERS * most_numel * self._wire.itemsize, self._meter, pinned=pinned)
        self._anchor = [torch.empty(wrapped.unit.numel, pin_memory=pinned) for wrapped in self._wrapped_units]
        self._synced = (-1, -1)
        self._done = 0
        register("diloco", self)
        self._counters = {"inner_steps": 0, "outer_steps_committed": 0, "outer_steps_not_committed": 0, "pulls": 0}
        with world_of(group).models.names.claiming(name, self._spec.described) as self.name:
            self._steps: StepClient = self._register(model)
            self.pull()

    def _register(self, model: nn.Module) -> StepClient:
        initialized = False
        while not initialized:
            steps, registered = world_of(self._group).models.register(self._spec, self.name)
            if registered.upload:
                materialize.upload(model, self._wrapped_units, steps, None)
            initialized = steps.view.wait_initialized(registered)
        group_of = tuple(
            0 if self._wrapped_units[unit].unit.trainable else -1 for unit, _ in self._spec.layout.parameters()
        )
        if 0 not in group_of:
            raise InvalidRequest("no parameter of the module is trainable; there is nothing to train")
        steps.register_optimizer(OptimizerSpec(name="sgd", groups=(self._hyper(),), group_of=group_of))
        return steps

    def _hyper(self) -> Hyper:
        return {"lr": float(self.outer_lr), **self._outer}

    # ------------------------------------------------------------------ steps

    def step(self, closure: Callable[[], float] | None = None) -> StepResult | None:
        """One step of the inner optimizer; every `inner_steps` of them, an outer step with everybody.

        Args:
            closure: as the inner optimizer takes it.

        Returns:
            None after an inner step. After an outer step what was decided: committed, and the parameters are the
            servers' new ones; or not committed, and the parameters retain their local progress, which is pushed with
            that of the next `inner_steps` steps. Exceptions to that: after non-finite pseudo-gradients, a worker
            whose own were non-finite goes back to the last sync with a fresh inner optimizer; and a worker that finds
            the job at another version than it synced with (a checkpoint was restored, or the job went on without it)
            takes the servers' values and loses its progress, at once, whatever the number of steps made.

        Raises:
            Timeout: no decision came in time.
            Broken: the coordinator or a shard server is gone for good.

        After an error: the outer step may or may not have committed; the next `step()` finds out and pulls if it has.
        """
        if self._synced != self._now():
            before = self._synced[1]
            self.pull()
            self._counters["outer_steps_not_committed"] += 1
            reason = f"the job went from version {before} to {self._synced[1]} without this worker; it pulled"
            return StepResult(committed=False, version=self._synced[1], grad_norm=0.0, reason=reason)
        if closure is None:
            self.inner_optimizer.step()
        else:
            self.inner_optimizer.step(closure)
        self._done += 1
        self._counters["inner_steps"] += 1
        return self.outer_step() if self._done % self.inner_steps == 0 else None

    def outer_step(self) -> StepResult:
        """Push the progress since the last sync and take what comes of it; `step` calls it when it is time.

        Every worker must call it, or the step waits for those that do not. Returns and raises as `step` does.
        """
        ticket = self._steps.ticket(self._synced)
        pushes = []
        finite = True
        for index, wrapped in enumerate(self._wrapped_units):
            if wrapped.unit.trainable:
                self._out.wait_for_room(wrapped.unit.numel * self._wire.itemsize)
                buffer = self._out.take(wrapped.unit.numel, TORCH_DTYPES[self._wire])
                finite &= self._progress_into(index, buffer, 1.0 / ticket.num_replicas)
                done = partial(self._out.give, buffer)
                pushes.append(self._steps.gradients.push(index, array_of(buffer, self._wire), ticket, done))
        decision = self._steps.vote(ticket, pushes, max_norm=0.0, hyper=[self._hyper()])
        if decision.outcome is Outcome.COMMIT:
            self.pull()
        elif decision.outcome is Outcome.ABORT:
            self._steps.view.job.wait_complete()
        elif not finite:
            self._to_anchor()
            self.inner_optimizer.state.clear()
        committed = decision.outcome is Outcome.COMMIT
        self._counters["outer_steps_committed" if committed else "outer_steps_not_committed"] += 1
        return StepResult(
            committed=committed, version=decision.version, grad_norm=decision.grad_norm, reason=decision.reason
        )

    def pull(self) -> None:
        """Take the servers' values; the local progress since the last sync is lost.

        Raises:
            Timeout: a shard server did not answer in time.

        After an error: the parameters are as before; `_anchor` is not, so the next `step` pulls again.
        """
        self._synced = (-1, -1)
        now = self._now()
        while self._synced != now:
            gathers = [self._steps.parameters.gather(i, anchor.numpy()) for i, anchor in enumerate(self._anchor)]
            try:
                for work in gathers:
                    work.wait()
                self._synced = now
            except StepAborted:  # restored to an older version meanwhile: take that
                if now == self._now():
                    raise
            now = self._now()
        self._to_anchor()
        self._round_anchor()
        self._done = 0
        self._counters["pulls"] += 1

    def _now(self) -> tuple[int, int]:
        return self._steps.view.epoch, self._steps.view.version

    def _progress_into(self, index: int, out: torch.Tensor, scale: float) -> bool:
        """out = scale · (anchor - parameters), of one unit; whether all of it is finite."""
        wrapped, anchor = self._wrapped_units[index], self._anchor[index]
        with torch.no_grad():
            for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                moved = anchor[spec.offset : spec.end].view(spec.shape) - param.to("cpu", torch.float32)
                out[spec.offset : spec.end].view(spec.shape).copy_(moved.mul_(scale))
        return bool(torch.isfinite(out).all())

    def _to_anchor(self) -> None:
        with torch.no_grad():
            for wrapped, anchor in zip(self._wrapped_units, self._anchor, strict=True):
                for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                    param.copy_(anchor[spec.offset : spec.end].view(spec.shape))

    def _round_anchor(self) -> None:
        """Progress is measured from where this worker begins: parameters below f32 begin at the rounded values."""
        for wrapped, anchor in zip(self._wrapped_units, self._anchor, strict=True):
            for spec, param in zip(wrapped.unit.parameters, wrapped.params, strict=True):
                if param.dtype != torch.float32:
                    anchor[spec.offset : spec.end].view(spec.shape).copy_(param.detach())

    # ------------------------------------------------------------------ values and counters

    @contextmanager
    def synced_parameters(self) -> Iterator[nn.Module]:
        """Inside, the module has the values of the last sync, the same on every worker: for evaluation.

        Do not train inside. Costs a second copy of the parameters meanwhile.
        """
        params = [p for wrapped in self._wrapped_units for p in wrapped.params]
        local = [p.detach().clone() for p in params]
        try:
            self._to_anchor()
            yield self.model
        finally:
            with torch.no_grad():
                for param, value in zip(params, local, strict=True):
                    param.copy_(value)

    @property
    def spec(self) -> JobSpec:
        """What the model was registered with."""
        return self._spec

    @property
    def version(self) -> int:
        """Committed outer steps, as this worker knows it."""
        return self._steps.view.latest_version

    def release(self) -> None:
        """As `FullyShardedDataParallel.release`; the module retains its values, and is a module like any other."""
        world_of(self._group).barrier("axon_ps/release")
        world_of(self._group).models.release(self._steps)

    def statistics(self) -> dict[str, float]:
        """Inner and outer steps, pulls, bytes of the copy at the last sync; the data plane's counters as `wire_*`."""
        return {
            **{k: float(v) for k, v in self._counters.items()},
            "anchor_bytes": float(sum(a.nbytes for a in self._anchor)),
            "peak_push_buffer_bytes": float(self._meter.peak_bytes),
            **{f"wire_{k}": v for k, v in self._steps.statistics().items()},
        }


class LocalSGD(DiLoCo):
    """`DiLoCo` whose outer step is the plain average of the workers' parameters (Stich 2019).

    Args:
        model: as for `DiLoCo`.
        inner_optimizer: as for `DiLoCo`.
        group: as for `DiLoCo`.
        inner_steps: as for `DiLoCo`.
        options: `wire_dtype`, `unit_types`, `plan_options` of `DiLoCo`.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        group: ProcessGroup | World | None = None,
        *,
        inner_steps: int,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            inner_optimizer,
            group,
            inner_steps=inner_steps,
            outer_lr=1.0,
            outer_momentum=0.0,
            nesterov=False,
            **options,
        )
