"""Local SGD and DiLoCo: train on a copy for H steps, then let the servers update all by the average progress.

    outer step t, on every worker w:
        local_w = parameters_t
        H times:  local_w = inner_optimizer(local_w, gradient on a batch of w's)
        push      parameters_t - local_w                     the pseudo-gradient
    on the servers:
        parameters_{t+1} = outer_optimizer(parameters_t, average of the pseudo-gradients)

The push is an ordinary synchronous step with another meaning of gradient. So deaths, joins and checkpoints are handled
as for every step, and each push counts exactly once. The average is weighted by each worker's training. Sources: Stich
2019 (local SGD); Douillard et al. 2023 (DiLoCo: AdamW inside, SGD with Nesterov momentum outside).

Owns: the arguments, and the user's module and inner optimizer; `OuterSteps` makes the outer steps.
Refuses: to average the inner optimizer's state and buffers (running statistics): they are each worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InvalidRequest
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.diloco.fragment import Fragment
from axon_ps.parallel.diloco.outer_steps import OuterSteps
from axon_ps.parallel.fsdp import arguments, wrap
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import LocalSteps
from axon_ps.sharding.precision import WirePrecision
from axon_ps.sharding.traffic import BUFFERS
from axon_ps.types import DType, Hyper, StepResult
from axon_ps.worker.world import World, world_of

_LEAST_WEIGHT = 1e-6
"""Least weight of a step, beside 0. The largest weight is one over this."""


class DiLoCo:
    """Train a plain module with a plain optimizer, and synchronize with the other workers every `inner_steps` steps.

    The module stays the user's: it gets no hooks, and every parameter stays in memory. Every worker must build the same
    module. All begin with the servers' values, also workers that join later. Buffers are each worker's own.

    Args:
        model: the module; not on the meta device.
        inner_optimizer: any torch optimizer of its parameters. Its state is this worker's own and is never sent.
        group: the workers that train it: a world, or its default group; None = the current world.
        inner_steps: local steps between two outer steps of a parameter, H.
        outer_lr: learning rate of the outer SGD.
        outer_momentum: its momentum; 0 with `outer_lr=1` and `nesterov=False` is plain averaging (local SGD).
        nesterov: True if that momentum is Nesterov's.
        wire_dtype: form in which pseudo-gradients are sent: a dtype, or a compressor or its name, with error feedback.
        param_wire_dtype: form in which parameters are sent: torch.float32, or a compressor or its name.
        fragments: number of fragments, P; see `outer_steps`, Note: [Streaming]. Units are dealt to them one by one.
        overlap_steps: inner steps that are made while an outer step is under way; fewer than H / P.
        mixing: from 0 to 1, alpha of Streaming DiLoCo's Algorithm 2: after an outer step during which inner steps were
            made, parameters are mixing * local + (1 - mixing) * new. That damps the outer momentum. None = the
            progress made meanwhile is added to the new values in full. This is better for plain averaging, where mixing
            would only lose some of it.
        quorum: the fraction of the workers that need not wait for the others. When so many have come to an outer step
            and `grace_s` seconds have passed, the others come to it after their present inner step. Their progress
            counts by their training. Workers then make different numbers of inner steps between outer steps. So joint
            actions (the end of training, a checkpoint, a barrier) must go by `version`. Train no other model in the
            same loop. None = all make all their inner steps.
        grace_s: seconds in which the others may come by themselves after the quorum.
        unit_types: module classes that are sent as units of their own; the rest of the module is one unit.
        plan_options: the sizes in which units are cut.
        name: as for `FullyShardedDataParallel`; with fragments, the beginning of their names.

    Attributes:
        outer_lr: learning rate of the coming outer step; the same on every worker.
        name: the job's name for the model.

    Raises:
        LayoutMismatch: another worker registered another module, `inner_steps` or outer optimizer.
        InvalidRequest: the module cannot be divided into units, or a setting is out of range.
        Misuse: no group was given and there is no current world.
        Timeout: the servers got no first values, or a shard server did not answer in time.
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
        wire_dtype: torch.dtype | Compressor | str = torch.float32,
        param_wire_dtype: torch.dtype | Compressor | str = torch.float32,
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing: float | None = 0.5,
        quorum: float | None = None,
        grace_s: float = 0.0,
        unit_types: Collection[type[nn.Module]] | type[nn.Module] = (),
        plan_options: PlanOptions | None = None,
        name: str | None = None,
    ) -> None:
        policy = LocalSteps(inner_steps=inner_steps, quorum=quorum or 0.0, grace_s=grace_s)
        group = current_group(group)
        if nesterov and not outer_momentum:
            raise InvalidRequest(
                f"outer_momentum is {outer_momentum}, and Nesterov's momentum (nesterov=True) needs one above 0; for "
                "plain averaging give outer_momentum=0, nesterov=False"
            )
        _check_schedule(inner_steps, fragments, overlap_steps, mixing)
        world = world_of(group)
        if len(group.ranks) != world.world_size:
            raise InvalidRequest(
                f"the group has {len(group.ranks)} of the world's {world.world_size} workers; all of them "
                "take part in an outer step, pass world.default_group"
            )
        if meta := [name for name, p in model.named_parameters() if p.is_meta]:
            raise InvalidRequest(f"parameter {meta[0]!r} is on the meta device; build the module on the CPU or a GPU")
        precision = WirePrecision.of(
            param_wire_dtype or torch.float32,
            wire_dtype,
            ("param_wire_dtype", "wire_dtype"),
            among=[DType.F32],
            by_tensor=False,
        )
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.inner_steps = inner_steps
        self._group = group
        outer: Hyper = {"momentum": outer_momentum, "nesterov": float(nesterov)}
        kinds = arguments.understood("unit_types", unit_types)
        divided = _divided(wrap.partition(model, lambda child: isinstance(child, kinds)), fragments)
        pinned = any(p.device.type == "cuda" for p in model.parameters())
        specs = [
            JobSpec(
                layout=wrap.layout_of(units),
                precision=precision,
                options=arguments.understood("plan_options", plan_options) or PlanOptions(),
                policy=policy,
                model=type(model).__qualname__,
            )
            for units in divided
        ]
        names = world.models.names
        with ExitStack() as claims:
            self.name = claims.enter_context(names.claiming(name, specs[0].described))
            called = [self.name, *(f"{self.name}/{i}" for i in range(1, fragments))]
            for other, spec in zip(called[1:], specs[1:], strict=True):
                claims.enter_context(names.claiming(other, spec.described))
            self._fragments = [
                Fragment(world, spec, units, each, pinned=pinned)
                for spec, units, each in zip(specs, divided, called, strict=True)
            ]
            numel = [w.unit.numel for fragment in self._fragments for w in fragment.units]
            buffer_bytes = BUFFERS * max(numel) * precision.grad.itemsize
            if overlap_steps:
                buffer_bytes = max(fragment.nbytes for fragment in self._fragments)
            self._meter = Meter()
            self._outer = OuterSteps(
                self.name,
                group,
                self._fragments,
                inner_steps // fragments,
                overlap_steps,
                mixing,
                BufferPool(buffer_bytes, self._meter, pinned=pinned),
                inner_optimizer,
                outer_lr,
                outer,
            )
            for fragment in self._fragments:
                fragment.register(model, self._outer.hyper)
            register("diloco", self)
            self.pull()
        if (fragments > 1 or overlap_steps) and any(fragment.now[1] for fragment in self._fragments):
            self._outer.left = 1  # it joins others; see `outer_steps`, Note: [Streaming]

    # ------------------------------------------------------------------ steps

    def step(self, closure: Callable[[], float] | None = None, *, weight: float = 1.0) -> StepResult | None:
        """Make one step of the inner optimizer. When it is time, begin or end an outer step with all workers.

        Args:
            closure: as the inner optimizer takes it.
            weight: its weight in the average over workers: the number of its tokens over the usual number, say.

        Returns:
            The result of an outer step that has ended; None after most inner steps. If the outer step committed, the
            parameters are the servers' new ones, with the progress made meanwhile (see `mixing`). If not, the local
            progress stays in the parameters, and is pushed with that of later steps. There are exceptions. After
            non-finite pseudo-gradients, a worker whose own were non-finite goes back to the last sync with a fresh
            inner optimizer. After the job was restored from a checkpoint, the next `step` takes the servers' values,
            and the worker's progress is lost. If the job went on without a worker, that worker takes the others'
            changes and retains its progress.

        Raises:
            InvalidRequest: the weight is neither 0 nor from 1e-6 to 1e6.
            Timeout: no decision came in time.
            Broken: the coordinator or a shard server is gone for good.

        After an error: the outer step may or may not have committed. If it has, the next `step()` pulls.
        """
        if weight != 0.0 and not _LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT:
            raise InvalidRequest(
                f"the weight of a step is {weight}; it must be 0, or from {_LEAST_WEIGHT:g} to {1 / _LEAST_WEIGHT:g}"
            )
        if (caught_up := self._outer.catch_up()) is not None:
            return caught_up
        if closure is None:
            self.inner_optimizer.step()
        else:
            self.inner_optimizer.step(closure)
        return self._outer.advance(weight)

    def outer_step(self) -> StepResult:
        """Push a fragment's progress since its last sync and take the result. `step` does so when it is time.

        Every worker must call it, since each waits for all. An outer step under way is ended first. Progress that was
        not made by `step` counts as that of `inner_steps` steps. Results and errors are those of `step`.
        """
        return self._outer.make()

    def sync(self) -> list[StepResult]:
        """Make an outer step of every fragment trained since its last one, so that the parameters have all progress.

        It is for the end of training, and before a checkpoint that is to have everything. Every worker must call it.
        Progress with a weight of 0 is lost.

        Returns:
            The result of each. If one did not commit, its progress is retained, and `sync` may be called again.

        Raises:
            Timeout: a worker or a decision did not come in time.
        """
        return self._outer.make_rest()

    def pull(self) -> None:
        """Take the servers' values. The local progress since the last sync is lost, and an outer step under way too.

        Raises:
            Timeout: a shard server did not answer in time.

        After an error: some fragments may have the servers' values; the next `step` pulls the others.
        """
        self._outer.pull()

    # ------------------------------------------------------------------ values and counters

    @contextmanager
    def synced_parameters(self) -> Iterator[nn.Module]:
        """Give the module the values of the last sync inside the block, for evaluation.

        They are the same on every worker. (If training went on during an outer step, parameters narrower than f32 may
        differ by their rounding.) Do not train inside. The block costs a second copy of the parameters.
        """
        params = [p for fragment in self._fragments for p in fragment.params()]
        local = [p.detach().clone() for p in params]
        try:
            for fragment in self._fragments:
                fragment.to_anchor()
            yield self.model
        finally:
            with torch.no_grad():
                for param, value in zip(params, local, strict=True):
                    param.copy_(value)

    @property
    def outer_lr(self) -> float:
        """Learning rate of the coming outer step; the same on every worker."""
        return self._outer.lr

    @outer_lr.setter
    def outer_lr(self, lr: float) -> None:
        self._outer.lr = lr

    @property
    def spec(self) -> JobSpec:
        """The spec with which the model, or its first fragment, was registered."""
        return self._fragments[0].spec

    @property
    def version(self) -> int:
        """Committed outer steps of all fragments, as this worker knows it."""
        return self._outer.version

    def release(self) -> None:
        """Release the model, as `FullyShardedDataParallel.release` does. The module stays, with its values."""
        self._outer.end_open()
        world_of(self._group).barrier("axon_ps/release")
        for fragment in self._fragments:
            world_of(self._group).models.release(fragment.steps)
        self._outer.close()

    def statistics(self) -> dict[str, float]:
        """Return inner and outer steps, pulls, bytes of the copy at the last sync. The data plane's are `wire_*`.

        `inner_steps_committed` are those of this worker whose progress is in the job's parameters, each times its
        weight. Divided by `inner_steps`, that is its goodput.
        """
        totals: dict[str, float] = {}
        for fragment in self._fragments:
            for key, value in fragment.steps.statistics().items():
                totals[f"wire_{key}"] = totals.get(f"wire_{key}", 0.0) + value
        return {
            **self._outer.counters,
            "anchor_bytes": float(sum(a.nbytes for fragment in self._fragments for a in fragment.anchor)),
            "peak_push_buffer_bytes": float(self._meter.peak_bytes),
            **totals,
        }


def _check_schedule(inner_steps: int, fragments: int, overlap_steps: int, mixing: float | None) -> None:
    if fragments < 1 or inner_steps % fragments:
        raise InvalidRequest(
            f"fragments is {fragments} and inner_steps {inner_steps}; inner_steps must be a multiple of the fragments, "
            "each of which has its outer step in turn"
        )
    if not 0 <= overlap_steps < inner_steps // fragments:
        raise InvalidRequest(
            f"overlap_steps is {overlap_steps}; it must be from 0 to {inner_steps // fragments - 1}, since an outer "
            f"step ends before the next one begins, {inner_steps // fragments} inner steps later"
        )
    if mixing is not None and not 0.0 <= mixing <= 1.0:
        raise InvalidRequest(
            f"mixing is {mixing}; it must be from 0 to 1, or None to add what was trained during an outer step whole"
        )


def _divided(units: Sequence[wrap.WrappedUnit], fragments: int) -> list[tuple[wrap.WrappedUnit, ...]]:
    """Return the units of each fragment, numbered anew: each is a model of its own.

    Neighbours are in different ones, as in the paper's strided fragments.

    Raises:
        InvalidRequest: there are fewer units that can be trained than fragments.
    """
    trainable = [unit for unit in units if unit.unit.trainable]
    if not trainable:
        raise InvalidRequest("no parameter of the module is trainable; there is nothing to train")
    if len(trainable) < fragments:
        raise InvalidRequest(
            f"fragments is {fragments} and the module has {len(trainable)} units with trainable parameters; give the "
            "classes of its layers as unit_types, or use fewer fragments"
        )
    fragment_of = {id(unit): index % fragments for index, unit in enumerate(trainable)}
    divided = ([unit for unit in units if fragment_of.get(id(unit), 0) == i] for i in range(fragments))
    return [tuple(replace(unit, number=number) for number, unit in enumerate(own)) for own in divided]


class LocalSGD(DiLoCo):
    """`DiLoCo` whose outer step is the plain average of the workers' parameters (Stich 2019).

    Args:
        model: as for `DiLoCo`.
        inner_optimizer: as for `DiLoCo`.
        group: as for `DiLoCo`.
        inner_steps: as for `DiLoCo`.
        mixing: as for `DiLoCo`; None, since a plain average has no momentum to damp.
        options: other arguments of `DiLoCo`, such as `wire_dtype`, `fragments`, `unit_types`.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        group: ProcessGroup | World | None = None,
        *,
        inner_steps: int,
        mixing: float | None = None,
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
            mixing=mixing,
            **options,
        )
