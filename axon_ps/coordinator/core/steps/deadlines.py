"""Deadlines of steps under `LocalSteps`: after a quorum of votes, the others are asked to vote with the work so far.

A worker need not have made all its local steps before such a step: its progress is weighted by the amount that it has
trained. So a slow worker delays the others by at most one of its local steps, and none of its work is lost. The quorum
and the grace period are those of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428), which goes on without the others'
progress. A worker that does not vote after the request is a straggler (`stragglers`). Pure.
"""

from __future__ import annotations

import math

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.types import Role
from axon_ps.wire.events import VoteRequest


class _Wait:
    """The present step of a model, and its deadline."""

    def __init__(self) -> None:
        self.attempt = (0, -1)  # generation and step
        self.deadline_s = math.inf
        self.asked = False


class StepDeadlines:
    """The deadline of each model's present step.

    Args:
        assembly: the members.
        models: the models of the job.
        out: gets the requests to workers.
    """

    def __init__(self, assembly: Assembly, models: Models, out: Outbox) -> None:
        self._assembly = assembly
        self._models = models
        self._out = out
        self._waits: dict[int, _Wait] = {}

    def look(self, now: float) -> None:
        """Update the deadlines, after a vote or report in a step, or a decision."""
        for model in self._models:
            policy = None if model.registration.spec is None else model.registration.spec.policy
            if policy is None or not policy.quorum:
                continue
            wait = self._waits.setdefault(model.number, _Wait())
            if wait.attempt != (attempt := self._attempt(model)):
                wait.attempt, wait.deadline_s, wait.asked = attempt, math.inf, False
            quorum = max(1, math.ceil(policy.quorum * len(self._assembly.membership.workers) - 1e-9))
            if math.isinf(wait.deadline_s) and model.attempts.come >= quorum:
                wait.deadline_s = now + policy.grace_s

    def again(self, worker: RosterEntry) -> None:
        """Repeat requests on a worker's new stream, since they may be lost with the old one."""
        for model in self._models:
            wait = self._waits.get(model.number)
            asked = wait is not None and wait.asked and wait.attempt == self._attempt(model)
            if asked and not model.attempts.has_come(worker.member.rank):
                self._out.push([worker.session], self._event(model))

    def tick(self, now: float) -> None:
        """Ask the workers that have not come to a step after its deadline."""
        for model in self._models:
            wait = self._present(model)
            if wait is None or now < wait.deadline_s:
                continue
            wait.asked = True
            workers = self._assembly.roster.of_role(Role.WORKER)
            late = [worker.session for worker in workers if not model.attempts.has_come(worker.member.rank)]
            self._out.push(late, self._event(model))

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`."""
        waits = filter(None, map(self._present, self._models))
        return min((wait.deadline_s for wait in waits), default=math.inf)

    def _present(self, model: Model) -> _Wait | None:
        """Return the wait in the present step of a model, unless the others were asked."""
        wait = self._waits.get(model.number)
        there = wait is not None and not wait.asked and wait.attempt == self._attempt(model)
        return wait if there else None

    def _event(self, model: Model) -> VoteRequest:
        return VoteRequest(generation=self._assembly.generation, step=model.step, model=model.number)

    def _attempt(self, model: Model) -> tuple[int, int]:
        return self._assembly.generation, model.step
