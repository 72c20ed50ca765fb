"""Local SGD and DiLoCo: train on a copy for H steps, then let the servers update all by the average progress.

    outer step t, on every worker w:
        local_w = parameters_t
        H times:  local_w = inner_optimizer(local_w, gradient on a batch of w's)
        push      parameters_t - local_w                     the pseudo-gradient
    on the servers:
        parameters_{t+1} = outer_optimizer(parameters_t, average of the pseudo-gradients)

The push is an ordinary synchronous step with another meaning of gradient, so deaths, joins, exactly-once and
checkpoints are those of every step. The average is weighted by each worker's training. Sources: Stich 2019 (local
SGD); Douillard et al. 2023 (DiLoCo: AdamW inside, SGD with Nesterov momentum outside).

Note: [Streaming]
    Douillard et al. 2025 (Streaming DiLoCo, https://arxiv.org/abs/2501.18512) divide the module into P fragments, each
    of which makes its outer step every H inner steps, H / P after the fragment before it. While a fragment's outer step
    is under way, `overlap_steps` more inner steps are made. So a P-th of the parameters is sent at once, and has time.
    `mixing` says what remains of these inner steps: Note: [Where a worker goes on] in `fragment`.

    The next fragment is the same on every worker: the first of those with the fewest outer steps. So workers agree also
    after one was lost in the middle. A worker that joins goes on where the others are: its first push is after its
    first inner step, and the others wait for nothing else of it.

Owns: the times at which fragments make their outer steps. Refuses: to touch the inner optimizer's state, which is this
worker's own, and buffers (running statistics), which are not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from axon_ps.collectives.functional import current_group
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import WorkQueue
from axon_ps.compress.compressor import Compressor
from axon_ps.errors import GenerationChanged, InvalidRequest
from axon_ps.host import fork
from axon_ps.observe.metrics.sources import register
from axon_ps.parallel.diloco.fragment import UNKNOWN, Ended, Fragment, Push
from axon_ps.parallel.fsdp import arguments, wrap
from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.parallel.work import QueuedWork
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import LocalSteps
from axon_ps.types import DType, Hyper, Outcome, StepResult
from axon_ps.worker.world import World, world_of

_LEAST_WEIGHT = 1e-6
"""Least weight of a step that counts at all; the largest weight is one over this."""

_BUFFERS = 2
"""Limit of the push buffers, in units of the largest one, if the worker waits for the outer step."""


class _UnderWay:
    """The outer step of a fragment that is under way."""

    def __init__(self, fragment: Fragment, push: Push, ended: QueuedWork[Ended]) -> None:
        self.fragment, self.push, self.ended = fragment, push, ended
        self.steps = 0  # inner steps since it began


class DiLoCo:
    """Train a plain module with a plain optimizer, and synchronize with the other workers every `inner_steps` steps.

    The module stays the user's: no hooks, every parameter in memory. Every worker must build the same module; its
    values become those of the servers. A worker that joins later begins with the servers' values. Buffers are
    each worker's own.

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
        fragments: number of fragments, P; see Note: [Streaming]. Units are dealt to them one by one.
        overlap_steps: inner steps that are made while an outer step is under way; fewer than H / P.
        mixing: from 0 to 1, alpha of Streaming DiLoCo's Algorithm 2: after an outer step during which inner steps were
            made, parameters are mixing * local + (1 - mixing) * new. That damps the outer momentum, and is better
            with one. None = the progress made meanwhile is added to the new values in full: better for plain averaging,
            where mixing would only lose some of it.
        quorum: the fraction of the workers that need not wait for the others: `grace_s` seconds after so many have come
            to an outer step, those that still train come to it, too, after their present inner step. Their progress
            counts by their training. Workers then make different numbers of inner steps between outer steps, so joint
            actions (the end of training, a checkpoint, a barrier) must go by `version`. Train no other model in the
            same loop. None = all make all their inner steps.
        grace_s: seconds in which the others may then come by themselves.
        unit_types: module classes that are sent as units of their own; the rest of the module is one unit.
        plan_options: the sizes in which units are cut.
        name: as for `FullyShardedDataParallel`; with fragments, the beginning of their names.

    Attributes:
        outer_lr: learning rate of the coming outer step; the same on every worker.
        name: the job's name for the model.

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
        wire_dtype: torch.dtype | Compressor | str = torch.float32,
        param_wire_dtype: torch.dtype | Compressor | str = torch.float32,
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing: float | None = 0.5,
        quorum: float | None = None,
        grace_s: float = 0.0,
        unit_types: Collection[type[nn.Module]] = (),
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
        precision = MixedPrecision(wire_dtype=param_wire_dtype, reduce_dtype=wire_dtype).wire(torch.float32)
        if precision.param is not DType.F32:
            raise InvalidRequest(f"param_wire_dtype is {param_wire_dtype}; use torch.float32, 'int8' or 'int4'")
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.inner_steps = inner_steps
        self.outer_lr = outer_lr
        self._outer = {"momentum": outer_momentum, "nesterov": float(nesterov)}
        self._group = group
        self._interval = self._left = inner_steps // fragments  # inner steps between pushes, and to the next one
        self._overlap_steps = overlap_steps
        self._mixing = mixing
        self._under_way: _UnderWay | None = None
        self._counters = {
            "inner_steps": 0.0, "inner_steps_committed": 0.0, "outer_steps_committed": 0.0,
            "outer_steps_not_committed": 0.0, "outer_steps_due": 0.0, "pulls": 0.0, "rebases": 0.0,
        }  # fmt: skip
        kinds = arguments.understood("unit_types", unit_types)
        divided = _divided(wrap.partition(model, lambda child: isinstance(child, kinds)), fragments)
        pinned = any(p.device.type == "cuda" for p in model.parameters())
        specs = [
            JobSpec(
                layout=wrap.layout_of(units),
                precision=precision,
                options=plan_options or PlanOptions(),
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
            for fragment in self._fragments:
                fragment.register(model, self._hyper())
            self._meter = Meter()
            self._out = BufferPool(self._buffer_bytes(), self._meter, pinned=pinned)
            self._queue = WorkQueue("axon-ps-diloco")
            fork.finalize(self, self._queue.close, 0.0)
            register("diloco", self)
            self.pull()
        if (fragments > 1 or overlap_steps) and any(fragment.now[1] for fragment in self._fragments):
            self._left = 1  # it joins others; see Note: [Streaming]

    def _buffer_bytes(self) -> int:
        if self._overlap_steps:
            return max(fragment.nbytes for fragment in self._fragments)
        numel = max(wrapped.unit.numel for fragment in self._fragments for wrapped in fragment.units)
        return _BUFFERS * numel * self.spec.precision.grad.itemsize

    def _hyper(self) -> Hyper:
        return {"lr": float(self.outer_lr), **self._outer}

    # ------------------------------------------------------------------ steps

    def step(self, closure: Callable[[], float] | None = None, *, weight: float = 1.0) -> StepResult | None:
        """Make one step of the inner optimizer; when it is time, begin or end an outer step with all workers.

        Args:
            closure: as the inner optimizer takes it.
            weight: its weight in the average over workers: the number of its tokens over the usual number, say.

        Returns:
            None after most inner steps; the result of an outer step that has ended. If it committed, the parameters are
            the servers' new ones, with the progress made meanwhile as `mixing` says. If not, the parameters retain
            their local progress, and it is pushed with that of later steps. There are exceptions. After non-finite
            pseudo-gradients, a worker whose own were non-finite goes back to the last sync with a fresh inner
            optimizer. A worker whose job was restored from a checkpoint takes the servers' values and loses its
            progress, at once, after any number of steps. If the job went on without a worker, that worker takes the
            others' changes and retains its progress.

        Raises:
            InvalidRequest: the weight is negative, or not a number.
            Timeout: no decision came in time.
            Broken: the coordinator or a shard server is gone for good.

        After an error: the outer step may or may not have committed; the next `step()` finds out and pulls if it has.
        """
        if weight != 0.0 and not _LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT:
            raise InvalidRequest(
                f"the weight of a step is {weight}; it must be 0, or from {_LEAST_WEIGHT:g} to {1 / _LEAST_WEIGHT:g}"
            )
        if (caught_up := self._catch_up()) is not None:
            return caught_up
        if closure is None:
            self.inner_optimizer.step()
        else:
            self.inner_optimizer.step(closure)
        self._counters["inner_steps"] += 1
        for fragment in self._fragments:
            fragment.weight += weight / self.inner_steps
        self._left -= 1
        result, requested = None, self._left > 0 and self._vote_requested()
        if (under_way := self._under_way) is not None:
            under_way.steps += 1
            if requested or under_way.steps >= self._overlap_steps:
                result = self._end()
        if (requested or self._left <= 0) and self._under_way is None:
            self._counters["outer_steps_due"] += requested
            self._begin(self._next())
            if not self._overlap_steps:
                result = self._end()
        return result

    def outer_step(self) -> StepResult:
        """Push a fragment's progress since its last sync and take the result; `step` does so when it is time.

        Every worker must call it, or the step waits for those that do not. An outer step under way is ended first.
        Progress that was not made by `step` counts as that of `inner_steps` steps. Results and errors are those of
        `step`.
        """
        if self._under_way is not None:
            self._end()
        fragment = self._next()
        fragment.weight = fragment.weight or 1.0
        if (caught_up := self._catch_up()) is not None:
            return caught_up
        self._begin(fragment)
        return self._end()

    def _next(self) -> Fragment:
        """Return the fragment whose outer step is next; see Note: [Streaming]."""
        return min(self._fragments, key=lambda f: f.steps.view.latest_version)

    def _vote_requested(self) -> bool:
        """Return True if a quorum waits for this worker in an outer step that it has not begun."""
        fragment = self._next()
        if (begun := fragment.begun) is not None and fragment.steps.attempt == (
            begun.ticket.generation,
            begun.ticket.step,
        ):
            return False
        return fragment.steps.vote_requested

    def sync(self) -> list[StepResult]:
        """Make an outer step of every fragment trained since its last, so that the parameters have all progress.

        It is for the end of training, and before a checkpoint that is to have everything; every worker must call it.
        Progress with a weight of 0 is lost by it.

        Returns:
            The result of each. If one did not commit, its progress is retained, and `sync` may be called again.

        Raises:
            Timeout: a worker did not come, or no decision.
        """
        while True:
            try:
                left = self._left_to_sync()
                break
            except GenerationChanged:
                continue  # the members changed while they agreed
        results = []
        for fragment in left:
            self._catch_up()
            self._begin(fragment)
            results.append(self._end())
        for fragment in self._fragments:
            if not fragment.weight:
                fragment.to_anchor()
        return results

    def _left_to_sync(self) -> list[Fragment]:
        """Return the fragments that any worker has trained since their last outer step; none is under way then.

        Raises:
            GenerationChanged: the members changed meanwhile.
        """
        self._end_open()
        weights = [fragment.weight for fragment in self._fragments]
        trained = zip(*self._gather_json("weights", weights), strict=True)
        return [fragment for fragment, by_worker in zip(self._fragments, trained, strict=True) if any(by_worker)]

    def _end_open(self) -> None:
        """End the outer step that is under way on any worker, unless others have ended it, and this worker's.

        A worker that has not begun it takes part. A worker whose outer step is over for another only gets its result.

        Raises:
            GenerationChanged: the members changed meanwhile.
        """
        self._catch_up()
        mine = None
        if (under_way := self._under_way) is not None:
            ticket = under_way.push.ticket
            mine = [self._fragments.index(under_way.fragment), [ticket.generation, ticket.step]]
        answers = self._gather_json("open", [[list(fragment.steps.attempt) for fragment in self._fragments], mine])
        newest = [max(known) for known in zip(*(attempts for attempts, _ in answers), strict=True)]
        opened = next((one for _, one in answers if one is not None and one[1] == newest[one[0]]), None)
        if mine is not None and mine != opened:
            self._end()
        if opened is not None:
            if self._under_way is None:
                self._begin(self._fragments[opened[0]])
            self._end()

    def _gather_json(self, what: str, value: Any) -> list[Any]:
        """Return the report of each worker, by rank."""
        return world_of(self._group).gather_json(value, name=f"axon_ps/diloco/{self.name}/{what}")

    def pull(self) -> None:
        """Take the servers' values; the local progress since the last sync is lost, and an outer step under way too.

        Raises:
            Timeout: a shard server did not answer in time.

        After an error: some fragments may have the servers' values; the next `step` pulls the others.
        """
        if (under_way := self._under_way) is not None:
            under_way.ended.cancel()
            self._under_way = None
        for fragment in self._fragments:
            fragment.synced = UNKNOWN
        for fragment in self._fragments:
            fragment.move(*fragment.gather(), None)
        self._left = self._interval
        self._counters["pulls"] += 1

    def _catch_up(self) -> StepResult | None:
        """Take the changes that the job made without this worker; return a result if it had to pull."""
        busy = None if self._under_way is None else self._under_way.fragment
        moved = [f for f in self._fragments if f is not busy and f.synced != f.now]
        if any(f.synced[0] != f.now[0] for f in moved):
            before = sum(fragment.synced[1] for fragment in self._fragments)
            self.pull()
            self._counters["outer_steps_not_committed"] += 1
            reason = f"the job went from version {before} to {self.version} without this worker; it pulled"
            return StepResult(committed=False, version=self.version, grad_norm=0.0, reason=reason)
        for fragment in moved:
            at, values = fragment.gather()
            known = fragment.begun is None  # else the last push may be among the changes
            fragment.move(at, values, fragment.anchor if known else None)
            self._counters["rebases" if known else "pulls"] += 1
        return None

    def _begin(self, fragment: Fragment) -> None:
        """Begin the outer step of a fragment."""
        push, hyper = fragment.push(self._out), self._hyper()
        ended = self._queue.submit(lambda: fragment.end(push, hyper))
        self._under_way = _UnderWay(fragment, push, QueuedWork(ended, f"an outer step of {fragment.name}"))
        self._left = self._interval

    def _end(self) -> StepResult:
        """Wait for the outer step that is under way, and take its result."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        fragment, push = under_way.fragment, under_way.push
        ended = under_way.ended.wait()
        decision, fragment.begun = ended.decision, None
        committed = ended.values is not None and ended.at[0] == fragment.synced[0]  # and not restored since
        if committed:
            fragment.take(push, ended, self._mixing if under_way.steps and not push.repeated else None)
            self._counters["inner_steps_committed"] += push.weight * self._interval  # a fragment is one of several
        elif decision.outcome is Outcome.SKIP and not push.finite:
            for each in self._fragments:
                each.to_anchor()
                each.weight = 0.0
            self.inner_optimizer.state.clear()
        self._counters["outer_steps_committed" if committed else "outer_steps_not_committed"] += 1
        return StepResult(
            committed=committed, version=self.version, grad_norm=decision.grad_norm, reason=decision.reason
        )

    # ------------------------------------------------------------------ values and counters

    @contextmanager
    def synced_parameters(self) -> Iterator[nn.Module]:
        """Give the module the values of the last sync, the same on every worker, inside the block: for evaluation.

        (Parameters below f32 have them up to their rounding, if training went on during an outer step.)

        Do not train inside. It costs a second copy of the parameters meanwhile.
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
    def spec(self) -> JobSpec:
        """The spec with which the model, or its first fragment, was registered."""
        return self._fragments[0].spec

    @property
    def version(self) -> int:
        """Committed outer steps of all fragments, as this worker knows it."""
        return sum(fragment.steps.view.latest_version for fragment in self._fragments)

    def release(self) -> None:
        """Release as `FullyShardedDataParallel.release`; the module retains its values, and is like any other."""
        self._end_open()
        world_of(self._group).barrier("axon_ps/release")
        for fragment in self._fragments:
            world_of(self._group).models.release(fragment.steps)
        self._queue.close(0.0)

    def statistics(self) -> dict[str, float]:
        """Return inner and outer steps, pulls, bytes of the copy at the last sync; the data plane's are `wire_*`.

        `inner_steps_committed` are those of this worker whose progress is in the job's parameters, each times its
        weight: over `inner_steps` that is its goodput.
        """
        totals: dict[str, float] = {}
        for fragment in self._fragments:
            for key, value in fragment.steps.statistics().items():
                totals[f"wire_{key}"] = totals.get(f"wire_{key}", 0.0) + value
        return {
            **self._counters,
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
    """Return the units of each fragment; neighbours are in different ones, as in the paper's strided fragments.

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
    number = {id(unit): index % fragments for index, unit in enumerate(trainable)}
    return [tuple(unit for unit in units if number.get(id(unit), 0) == i) for i in range(fragments)]


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
