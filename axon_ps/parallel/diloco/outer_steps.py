"""`OuterSteps`: the steps that a module's fragments make together with the other workers.

Owns: the fragment whose outer step is next, and the one whose outer step is under way. Refuses: inner steps.

Note: [Streaming]
    Douillard et al. 2025 (Streaming DiLoCo, https://arxiv.org/abs/2501.18512) divide the module into P fragments, each
    of which makes its outer step every H inner steps, H / P after the fragment before it. While a fragment's outer step
    is under way, `overlap_steps` more inner steps are made. So only a P-th of the parameters is sent at a time, and
    training goes on meanwhile. For the effect of these inner steps see `fragment`, Note: [Where a worker goes on].

    The next fragment is the same on every worker: the first of those with the fewest outer steps. So workers agree also
    after a worker was lost between fragments. A worker that joins pushes after its first inner step. The others wait
    for nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import WorkQueue
from axon_ps.errors import GenerationChanged
from axon_ps.host import fork
from axon_ps.parallel.diloco.fragment import UNKNOWN, Fragment, OuterPush, OuterResult
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.work import QueuedWork
from axon_ps.types import Hyper, Outcome, StepResult
from axon_ps.worker.world import world_of


class _UnderWay:
    """The outer step of a fragment that is under way."""

    def __init__(self, fragment: Fragment, push: OuterPush, ended: QueuedWork[OuterResult]) -> None:
        self.fragment, self.push, self.ended = fragment, push, ended
        self.steps = 0  # inner steps since it began


class OuterSteps:
    """The outer steps of a module's fragments.

    Args:
        name: name of the first fragment's model in the job.
        group: the workers that make them.
        fragments: the fragments, registered.
        interval: inner steps between two outer steps, H / P.
        overlap_steps: inner steps that are made while an outer step is under way.
        mixing: as for `DiLoCo`.
        out: buffers for pushes.
        inner_optimizer: the optimizer of inner steps, which gets a fresh state after progress that is not finite.
        lr: as the attribute.
        options: other hyperparameters of the outer optimizer.

    Attributes:
        lr: learning rate of the coming outer step.
        counters: inner and outer steps, pulls; see `DiLoCo.statistics`.
        left: inner steps to the next outer step.
        out: as given.
    """

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        fragments: Sequence[Fragment],
        interval: int,
        overlap_steps: int,
        mixing: float | None,
        out: BufferPool,
        inner_optimizer: torch.optim.Optimizer,
        lr: float,
        options: Hyper,
    ) -> None:
        self._name = name
        self._group = group
        self._fragments = fragments
        self._interval = self.left = interval
        self._overlap_steps = overlap_steps
        self._mixing = mixing
        self.out = out
        self._inner_optimizer = inner_optimizer
        self.lr = lr
        self._options = options
        self._under_way: _UnderWay | None = None
        self.counters = {
            "inner_steps": 0.0, "inner_steps_committed": 0.0, "outer_steps_committed": 0.0,
            "outer_steps_not_committed": 0.0, "outer_steps_due": 0.0, "pulls": 0.0, "rebases": 0.0,
        }  # fmt: skip
        self._queue = WorkQueue("axon-ps-diloco")
        fork.finalize(self, self._queue.close, 0.0)

    def close(self) -> None:
        """End the thread that waits for decisions."""
        self._queue.close(0.0)

    @property
    def version(self) -> int:
        """Committed outer steps of all fragments, as this worker knows it."""
        return sum(fragment.steps.view.latest_version for fragment in self._fragments)

    @property
    def hyper(self) -> Hyper:
        """The hyperparameters of the coming outer step."""
        return {"lr": float(self.lr), **self._options}

    # ------------------------------------------------------------------ when

    def advance(self, weight: float) -> StepResult | None:
        """Count an inner step of this weight. When it is time, begin or end an outer step, and return its result."""
        self.counters["inner_steps"] += 1
        for fragment in self._fragments:
            fragment.weight += weight / (self._interval * len(self._fragments))
        self.left -= 1
        result, requested = None, self.left > 0 and self.vote_requested()
        if (under_way := self._under_way) is not None:
            under_way.steps += 1
            if requested or under_way.steps >= self._overlap_steps:
                result = self._end()
        if (requested or self.left <= 0) and self._under_way is None:
            self.counters["outer_steps_due"] += requested
            self._begin(self._next())
            if not self._overlap_steps:
                result = self._end()
        return result

    def make(self) -> StepResult:
        """Make an outer step now, after the one under way. See `DiLoCo.outer_step`."""
        if self._under_way is not None:
            self._end()
        fragment = self._next()
        fragment.weight = fragment.weight or 1.0
        if (caught_up := self.catch_up()) is not None:
            return caught_up
        self._begin(fragment)
        return self._end()

    def make_rest(self) -> list[StepResult]:
        """Make an outer step of every fragment that a worker has trained since the last one. See `DiLoCo.sync`."""
        while True:
            try:
                left = self._left_to_sync()
                break
            except GenerationChanged:
                continue  # the members changed while they agreed
        results = []
        for fragment in left:
            self.catch_up()
            self._begin(fragment)
            results.append(self._end())
        for fragment in self._fragments:
            if not fragment.weight:
                fragment.to_anchor()
        return results

    def _next(self) -> Fragment:
        """Return the fragment whose outer step is next. See Note: [Streaming]."""
        return min(self._fragments, key=lambda f: f.steps.view.latest_version)

    def vote_requested(self) -> bool:
        """Return True if a quorum waits for this worker in an outer step that it has not begun."""
        fragment = self._next()
        if (begun := fragment.begun) is not None and fragment.steps.attempt == (
            begun.ticket.generation,
            begun.ticket.step,
        ):
            return False
        return fragment.steps.vote_requested

    def _left_to_sync(self) -> list[Fragment]:
        """End open outer steps, and return the fragments that any worker has trained since their last one.

        Raises:
            GenerationChanged: the members changed meanwhile.
        """
        self.end_open()
        weights = [fragment.weight for fragment in self._fragments]
        trained = zip(*self._gather_json("weights", weights), strict=True)
        return [fragment for fragment, by_worker in zip(self._fragments, trained, strict=True) if any(by_worker)]

    def end_open(self) -> None:
        """End this worker's outer step under way, and the newest that any worker has under way.

        A worker that has not begun the latter takes part in it. An outer step is over if any worker knows a newer
        attempt of its fragment. Then its worker only gets the result.

        Raises:
            GenerationChanged: the members changed meanwhile.
        """
        self.catch_up()
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
        return world_of(self._group).gather_json(value, name=f"axon_ps/diloco/{self._name}/{what}")

    # ------------------------------------------------------------------ one of them

    def pull(self) -> None:
        """Take the servers' values. The local progress since the last sync is lost, and an outer step under way too.

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
        self.left = self._interval
        self.counters["pulls"] += 1

    def catch_up(self) -> StepResult | None:
        """Take the changes that the job made without this worker, and return a result if it had to pull."""
        busy = None if self._under_way is None else self._under_way.fragment
        moved = [f for f in self._fragments if f is not busy and f.synced != f.now]
        if any(f.synced[0] != f.now[0] for f in moved):
            before = sum(fragment.synced[1] for fragment in self._fragments)
            self.pull()
            self.counters["outer_steps_not_committed"] += 1
            reason = f"the job went from version {before} to {self.version} without this worker; it pulled"
            return StepResult(committed=False, version=self.version, grad_norm=0.0, reason=reason)
        for fragment in moved:
            at, values = fragment.gather()
            known = fragment.begun is None  # else the last push may be among the changes
            fragment.move(at, values, fragment.anchor if known else None)
            self.counters["rebases" if known else "pulls"] += 1
        return None

    def _begin(self, fragment: Fragment) -> None:
        """Begin the outer step of a fragment."""
        push, hyper = fragment.push(self.out), self.hyper
        ended = self._queue.submit(lambda: fragment.end(push, hyper))
        self._under_way = _UnderWay(fragment, push, QueuedWork(ended, f"an outer step of {fragment.name}"))
        self.left = self._interval

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
            self.counters["inner_steps_committed"] += push.weight * self._interval  # a fragment is one of several
        elif decision.outcome is Outcome.SKIP and not push.finite:
            for each in self._fragments:
                each.to_anchor()
                each.weight = 0.0
            self._inner_optimizer.state.clear()
        self.counters["outer_steps_committed" if committed else "outer_steps_not_committed"] += 1
        return StepResult(
            committed=committed, version=self.version, grad_norm=decision.grad_norm, reason=decision.reason
        )
