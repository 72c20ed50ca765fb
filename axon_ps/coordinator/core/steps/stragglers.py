"""Workers that are late in a step: those that the others wait for, and those asked for a vote. Pure.

The time of a step begins with the first worker that waits in it. If all replicas step together, that is the first
worker that has voted or *arrived*. An arrived worker waits until the servers take gradients that it has computed. The
servers sum in replica order. So without memory for early gradients, a worker that comes after a straggler in this order
can neither push nor vote. With asynchronous replicas the time begins with the first worker that has to wait for the
slowest. Each model has its own step.

Note: [Deadlines]
    Under `LocalSteps` a worker need not have made all its local steps before it votes: its progress is weighted by the
    amount that it has trained. So after a quorum of votes and a grace period, the others are asked to vote with the
    work so far. A slow worker delays the others by at most one of its local steps, and none of its work is lost. The
    quorum and the grace period are those of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428), which goes on without
    the others' progress. A worker that does not vote after the request is a straggler.

Invariants: a straggler is named only while at least as many others as the job needs take part. The stragglers are
not computed before the time is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.types import Role
from axon_ps.wire.events import VoteRequest

RECHECK_S = 1.0
"""Seconds between two checks that enough others take part, after the time is over."""


class _Wait:
    """The wait in the present step of one model."""

    def __init__(self) -> None:
        self.name = (0, -1)  # generation, and step or lowest clock
        self.since = math.inf
        self.recheck = -math.inf


class Stragglers:
    """The waits in the present steps.

    Args:
        assembly: the members.
        models: the models of the job.
        step_timeout_s: seconds that the others wait; inf = for ever.
    """

    def __init__(self, assembly: Assembly, models: Models, step_timeout_s: float) -> None:
        self._assembly = assembly
        self._models = models
        self._step_timeout_s = step_timeout_s
        self._waits: dict[int, _Wait] = {}

    def look(self, now: float) -> None:
        """Update the waits, after a vote or report in a step, or a decision."""
        self._waits = {m.number: self._waits.get(m.number) or _Wait() for m in self._models}
        for model in self._models:
            wait, name = self._waits[model.number], self._present(model)
            if name != wait.name:
                wait.name, wait.since, wait.recheck = name, math.inf, -math.inf
            if wait.since == math.inf and model.attempts.has_waiters:
                wait.since = now

    def what(self) -> str:
        """Return the step of the longest wait, as text."""
        longest = self._longest()
        return "" if longest is None else self._name(longest)

    def late(self, now: float) -> Sequence[int]:
        """Return the workers to set aside; none before the time is over, or while too few others take part."""
        for model in self._waiting():
            if now < self._deadline(model):
                continue
            self._waits[model.number].recheck = now + RECHECK_S
            missing = model.attempts.missing()
            there = model.attempts.left_without(missing)
            if missing and there >= max(1, self._assembly.needed_workers):
                return missing
        return ()

    def next_deadline(self) -> float:
        """Return the time of the next call of `late`."""
        return min((self._deadline(model) for model in self._waiting()), default=math.inf)

    def longest_wait(self, now: float) -> tuple[float, str]:
        """Return the seconds that the others have waited, and a text that names the stragglers; (0, "") = no wait."""
        longest = self._longest()
        missing = () if longest is None else longest.attempts.missing()
        if longest is None or not missing:
            return 0.0, ""
        waited_s = now - self._waits[longest.number].since
        without = "" if math.isinf(self._step_timeout_s) else f"; they are set aside after {self._step_timeout_s:g} s"
        text = f"{self._name(longest)} has waited {waited_s:.0f} s for worker {format_ranks(missing)}{without}"
        return waited_s, text

    def _longest(self) -> Model | None:
        return min(self._waiting(), key=lambda m: (self._waits[m.number].since, m.number), default=None)

    def _name(self, model: Model) -> str:
        number = self._waits[model.number].name[1]
        step = f"clock {number}" if model.attempts.asynchronous else f"the step to version {model.version + 1}"
        return f"{step} of model {model.name!r}" if len(self._models) > 1 else step

    def _deadline(self, model: Model) -> float:
        wait = self._waits[model.number]
        return max(wait.since + self._step_timeout_s, wait.recheck)

    def _waiting(self) -> list[Model]:
        """Return the models in whose current step a worker waits."""
        found = []
        for model in self._models:
            wait = self._waits.get(model.number)
            there = wait is not None and wait.since < math.inf and wait.name == self._present(model)
            if there and model.attempts.has_waiters:
                found.append(model)
        return found

    def _present(self, model: Model) -> tuple[int, int]:
        attempts = model.attempts
        return self._assembly.generation, attempts.slowest if attempts.asynchronous else model.step


class _Deadline:
    """The present step of a model, and its deadline."""

    def __init__(self) -> None:
        self.attempt = (0, -1)  # generation and step
        self.deadline_s = math.inf
        self.asked = False


class StepDeadlines:
    """The deadline of each model's present step. See Note: [Deadlines].

    Args:
        assembly: the members.
        models: the models of the job.
        out: gets the requests to workers.
    """

    def __init__(self, assembly: Assembly, models: Models, out: Outbox) -> None:
        self._assembly = assembly
        self._models = models
        self._out = out
        self._waits: dict[int, _Deadline] = {}

    def look(self, now: float) -> None:
        """Update the deadlines, after a vote or report in a step, or a decision."""
        for model in self._models:
            policy = None if model.registration.spec is None else model.registration.spec.policy
            if policy is None or not policy.quorum:
                continue
            wait = self._waits.setdefault(model.number, _Deadline())
            if wait.attempt != (attempt := self._attempt(model)):
                wait.attempt, wait.deadline_s, wait.asked = attempt, math.inf, False
            quorum = max(1, math.ceil(policy.quorum * len(model.attempts.participants) - 1e-9))
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
        """After the deadline of a step, ask for the votes of the workers that have not come to it."""
        for model in self._models:
            wait = self._present(model)
            if wait is None or now < wait.deadline_s:
                continue
            wait.asked = True
            ranks = [rank for rank in model.attempts.participants if not model.attempts.has_come(rank)]
            workers = (self._assembly.roster.at(Role.WORKER, rank) for rank in ranks)
            late = [worker.session for worker in workers if worker is not None]
            self._out.push(late, self._event(model))

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`."""
        waits = filter(None, map(self._present, self._models))
        return min((wait.deadline_s for wait in waits), default=math.inf)

    def _present(self, model: Model) -> _Deadline | None:
        """Return the wait in the present step of a model, unless the others were asked."""
        wait = self._waits.get(model.number)
        there = wait is not None and not wait.asked and wait.attempt == self._attempt(model)
        return wait if there else None

    def _event(self, model: Model) -> VoteRequest:
        return VoteRequest(generation=self._assembly.generation, step=model.step, model=model.number)

    def _attempt(self, model: Model) -> tuple[int, int]:
        return self._assembly.generation, model.step
