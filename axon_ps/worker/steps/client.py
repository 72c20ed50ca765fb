"""`StepClient`: a worker's part in the training steps of one model.

A step begins with a *ticket* (generation, step, replica, number of replicas). The ticket is taken when the first
gradient of the step is pushed, and used for all of the step. The step ends with a vote, which blocks until the
decision. Gathers and pushes run on the background loop and return `Work` handles.

Invariant: when the membership changes, the ticket is void. Its pushes are dropped, and no vote is sent: `vote` returns
an aborted decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from axon_ps.collectives.work import Awaited
from axon_ps.coordinator.client.session import CoordinatorClient, Event, JobState, Registered
from axon_ps.errors import AxonError, GenerationChanged, InvalidRequest, Misuse, StepAborted, Timeout
from axon_ps.observe.moments import Moment, reached
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.deadlines import Deadline
from axon_ps.shard.client.client import ShardGroup
from axon_ps.sharding.job import JobSpec
from axon_ps.types import CopyFrom, Decision, Hyper, Membership, OptimizerChange, OptimizerSpec, Outcome
from axon_ps.wire.events import Arrived, Vote, VoteRequest
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.calls import ModelCalls
from axon_ps.worker.steps.gradients import Gradients
from axon_ps.worker.steps.parameters import Parameters
from axon_ps.worker.steps.step_trace import StepTrace
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.steps.view import ModelView

_ARRIVED_INTERVAL_S = 1.0
"""Seconds between two reports that this worker waits for its pushes, so that it does not count as a straggler."""

_STATUS_TIMEOUT_S = 2.0
"""Seconds that the coordinator may take to name the members that a step waits for, once the step has timed out."""


class StepClient:
    """The steps of one model; thread-safe.

    Args:
        loop: the background loop for all calls.
        coordinator: the joined session. Its events about the model must be passed to `on_event`.
        shards: the connections to the shard servers, for this model.
        job: the job's members.
        model: number of the model.

    Attributes:
        view: this worker's view of the model.
        parameters: gathers them.
        gradients: pushes them.
        trace: the spans of its steps.
    """

    def __init__(
        self, loop: BackgroundLoop, coordinator: CoordinatorClient, shards: ShardGroup, job: JobView, model: int = 0
    ) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._shards = shards
        self._votes = 0
        self._decision_wait_s = 0.0
        self.view = ModelView(job, model)
        self.trace = StepTrace(coordinator, self.view)
        self._calls = ModelCalls(coordinator, self.view, self.trace)
        self.parameters = Parameters(loop, shards, self.view, self._calls, self.trace)
        self.gradients = Gradients(loop, shards, self.view, self._calls, self.trace)

    def on_event(self, event: Event) -> None:
        """Apply one event of the session, in order, on the loop's thread. `JobView` must have a membership before."""
        view = self.view
        with view.job.changed:
            if isinstance(event, Decision):
                view.on_decision(event)
            elif isinstance(event, VoteRequest):
                view.requested_attempt = event.generation, event.step
            elif isinstance(event, Membership):
                view.begin(event)
            elif isinstance(event, JobState):
                epoch = view.epoch
                view.on_state(event)
                if view.epoch != epoch:
                    self._shards.forget_residuals()
                if event.released:
                    self._shards.release()
                if event.spec is not None:
                    self._shards.set_spec(event.spec)
                if event.placement is not None:
                    self._shards.set_placement(event.placement)
            self._calls.end_stale()
            view.job.changed.notify_all()

    def registered(self, spec: JobSpec, reply: Registered, name: str) -> None:
        """Record that this process has registered the model, with this layout and this reply. Called on the loop."""
        with self.view.job.changed:
            self._shards.set_spec(spec)
            self.view.registered(spec, reply, name)

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Set the model's optimizer, or check ours against the one it has.

        Raises:
            LayoutMismatch: another rank registered other groups or hyperparameters.
        """
        timeout_s = self.view.job.timeout_s
        registering = self._coordinator.register(optimizer=optimizer, timeout_s=timeout_s, name=self.view.name)
        self._loop.run(registering, timeout_s)

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Check that an optimizer can replace the model's, with a step.

        Raises:
            InvalidRequest: it cannot be, or a shard server does not know it.
            Busy: the shard servers have no memory for its moments.
        """
        timeout_s = self.view.job.timeout_s
        checking = self._coordinator.register(optimizer=optimizer, timeout_s=timeout_s, name=self.view.name, later=True)
        self._loop.run(checking, timeout_s)

    def statistics(self) -> dict[str, float]:
        """Return counters of the data plane: bytes, streams, retries; with asynchronous steps, clocks and waiting.

        `mapped_bytes_in` is the part of `bytes_in` that was mapped without a copy.
        """
        counters = self._shards.statistics() | {"mapped_bytes_in": 0.0}
        for name in ("bytes_in", "leased_bytes_in", "mapped_bytes_in"):
            counters[name] += self.parameters.mapped_bytes
        waits = {"votes": float(self._votes), "decision_wait_s": self._decision_wait_s}
        return counters | waits | self.view.stepping.statistics()

    # ------------------------------------------------------------------ a step

    @property
    def attempt(self) -> tuple[int, int]:
        """(generation, step) of the attempt that a new ticket would be for."""
        with self.view.job.changed:
            return self.view.membership.generation, self.view.stepping.next_attempt

    @property
    def vote_requested(self) -> bool:
        """True if others wait in `attempt`, with a quorum of `LocalSteps`, and this worker should join it."""
        return self.view.requested_attempt == self.attempt

    def ticket(self, began: tuple[int, int] | None = None, dealt: int | None = None) -> Ticket:
        """Return the ticket of the step attempt that starts now.

        Args:
            began: (epoch, version) that the step is computed from. If that is not `view.latest` any more the ticket is
                void, since gradients of an older version must not count in a newer generation. None = any.
            dealt: the generation in which the samples of the step were dealt to the replicas. In another one the ticket
                is void, since others have some of the same samples then. None = any.

        Raises:
            Misuse: the model was released.
            MemberLost: this worker is not a member any more, or another worker of its replica has finished.
            Timeout: another worker of its replica is missing.
        """
        view = self.view
        with view.job.changed:
            view.check_released()
            view.wait_in_replica()
            latest = view.latest
            ticket = view.stepping.ticket(view.latest_version, view.membership, view.me.replica)
        self.trace.ticket(ticket)
        if dealt not in (None, ticket.generation):
            return ticket.void("the members changed after the samples of the step had been dealt to them")
        if began in (None, latest):
            return ticket
        return ticket.void(
            f"the step began at version {began[1]} and the model is at {latest[1]}: it went on while this worker was "
            "no member, or was restored"
        )

    def check_addends(self) -> None:
        """Check that the coordinator decides steps of several addends.

        Raises:
            Misuse: it is of an older axon_ps.
        """
        if not self._coordinator.sums_addends:
            raise Misuse(
                "this is a second backward before optimizer.step(), and the coordinator is of an older axon_ps, which "
                "takes one: start it with a newer one, or accumulate the gradients of a step without sync"
            )

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """Set the model to (1 - weight) * its values + weight * another's, in a step. Every worker calls it.

        Args:
            source: the client of the other model.
            weight: above 0, at most 1.

        Returns:
            The decision, as of `vote`.

        Raises:
            InvalidRequest: the models are not sharded alike, or replicas of one of them step asynchronously.
            Misuse: one of them is not registered here, or was released.
            Timeout: no decision came. The step may still commit.
        """
        mine, theirs = self.view, source.view
        mine.check_released()
        theirs.check_released()
        if mine.spec is None or theirs.spec is None:
            raise Misuse("copy_from needs two models that were registered by this process")
        if mine.spec.policy.asynchronous or theirs.spec.policy.asynchronous:
            raise InvalidRequest(
                "copy_from needs a version that all workers agree on; replicas of one model step asynchronously"
            )
        if difference := mine.spec.cut_difference(theirs.spec):
            raise InvalidRequest(f"model {mine.name!r} cannot take the values of {theirs.name!r}: {difference}")
        copy = CopyFrom(source=theirs.model, weight=weight)
        return self.vote(self.ticket(), (), max_norm=0.0, hyper=(), copy=copy)

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        copy: CopyFrom | None = None,
        commit: Mapping[str, str] | None = None,
        weight: float | None = None,
        untouched: Iterable[int] = (),
        withdrawn: bool = False,
        optimizer: OptimizerChange | None = None,
    ) -> Decision:
        """Report that this worker pushes nothing else, and wait for the pushes and the decision.

        The vote is sent before the pushes have ended. The step is still not decided before the servers report that they
        have all pushes. So the decision comes one round trip after the last push, and not two.

        Args:
            ticket: the step.
            pushes: its pushes, all of which have begun.
            max_norm: global L2 norm to clip to; 0 = do not clip.
            hyper: per parameter group, this step's hyperparameters.
            copy: the copy from another model; None = the step takes gradients.
            commit: values to commit with the step, by name. Every worker gives the same.
            weight: the factor of the pushes. The sum of all pushes is divided by the sum of all workers' weights. None
                = the factor is 1 / number of replicas, on all workers.
            untouched: numbers in the layout of trainable parameters that this worker has no gradient of. A parameter
                stays as it is if no worker has a gradient of it.
            withdrawn: True = the pushes do not count. The step is aborted for all, once all have voted.
            optimizer: replaces the model's with this step. Every worker gives the same. None = it stays.

        Returns:
            The decision; an abort when the membership changed meanwhile. By then this worker has received the
            generation that the next attempt runs in.

        Raises:
            Timeout: no decision came. The step may still commit.
            AxonError: a push failed for another reason than a membership change.
        """
        view, job, stepping = self.view, self.view.job, self.view.stepping
        blocked = job.blocks()
        try:
            with self.trace.within("vote") as span:
                mine = Vote(
                    generation=ticket.generation,
                    step=ticket.step,
                    max_norm=max_norm,
                    hyper=tuple(hyper),
                    version=view.version,
                    model=view.model,
                    copy=copy,
                    blocked=blocked,
                    commit=dict(commit or {}),
                    weight=weight,
                    untouched=tuple(sorted(untouched)),
                    withdrawn=withdrawn,
                    optimizer=optimizer,
                    last_addend=ticket.addend,
                    traceparent="" if span is None else span.context.traceparent,
                )
                decision = self._decided(ticket, pushes, mine)
            job.wait_generation(decision.next_generation, job.timeout_s)
            if not stepping.acknowledges(decision):  # else that was done when it arrived
                with job.changed:
                    job.acknowledge()
            self._shards.settle(ticket.step, decision)
            began = time.perf_counter()
            job.wait_until(
                lambda: True if stepping.may_proceed(ticket.generation) else None, job.timeout_s, stepping.why_waiting
            )
            stepping.wait_s += time.perf_counter() - began
        except BaseException as error:
            self.trace.failed(error)
            raise
        finally:
            stepping.end_step()
        self.trace.decided(decision)
        return decision

    def _decided(self, ticket: Ticket, pushes: Sequence[Awaited], vote: Vote) -> Decision:
        """Vote, if there is something to vote on, and wait for the pushes and the decision."""
        view, stepping = self.view, self.view.stepping
        voted = view.valid(ticket) and view.membership.complete
        if voted:
            reached(Moment.VOTE)
            self._coordinator.vote(vote, stepping.voter(ticket))
            self._votes += 1
        try:
            with self.trace.within("push wait"):
                self._wait_pushed(pushes)
        except (GenerationChanged, StepAborted) as error:
            return _aborted(self.view, ticket, ticket.why_void or str(error))
        if not voted:
            return _aborted(self.view, ticket, _why_not(self.view, ticket))

        def decided() -> Decision | None:
            if not view.valid(ticket):
                return _aborted(self.view, ticket, "the membership changed")
            if (decision := stepping.decision_on(ticket)) is None:
                view.check_released()
            return decision

        what = f"step {ticket.step} is not decided: a worker has not voted or a shard server is not ready"
        began = time.perf_counter()
        try:
            decision = view.job.wait_until(decided, view.job.timeout_s, lambda: what)
        except Timeout as error:
            raise Timeout(f"{error}{self._stragglers()}") from error
        waited_s = time.perf_counter() - began
        self.trace.seconds["vote"].observe(waited_s)
        self._decision_wait_s += waited_s
        return decision

    def _wait_pushed(self, pushes: Sequence[Awaited]) -> None:
        """Wait for all pushes, together at most as long as for a decision."""
        deadline = Deadline(self.view.job.timeout_s)
        for work in pushes:
            try:
                work.wait(deadline.remaining())
            except Timeout as error:
                if work.is_completed():
                    raise
                raise Timeout(f"{error}{self._stragglers()}") from error

    def wait_for_capacity(self, ticket: Ticket, wait: Callable[[float], None]) -> None:
        """Wait in a backward until the servers have taken earlier pushes, and report that this worker waits.

        They may take them only after another worker has pushed. That worker may wait for this one in a step of another
        model, or may have voted with fewer addends. With a quorum of `LocalSteps`, it is asked to join the step only
        once enough others wait in it.

        Args:
            ticket: the step.
            wait: waits so many seconds, or raises `Timeout`.

        Raises:
            Timeout: the servers have not taken them in time.
        """
        blocked, deadline = self.view.job.blocks_before_vote(), Deadline(self.view.job.timeout_s)
        policy = None if self.view.spec is None else self.view.spec.policy
        reports = blocked or ticket.addend > 0 or (policy is not None and policy.quorum > 0)
        while True:
            try:
                return wait(min(_ARRIVED_INTERVAL_S, deadline.remaining()) if reports else deadline.remaining())
            except Timeout:
                if deadline.expired or not reports:
                    raise
            if self.view.stepping.voter(ticket) is None and self.view.valid(ticket):
                self._coordinator.arrived(
                    Arrived(
                        generation=ticket.generation,
                        step=ticket.step,
                        model=self.view.model,
                        blocked=blocked,
                        addend=ticket.addend,
                    )
                )

    def _stragglers(self) -> str:
        """Return the members that the current step waits for; empty if the coordinator does not reply."""
        try:
            pending = self._loop.run(self._coordinator.status(_STATUS_TIMEOUT_S), _STATUS_TIMEOUT_S).pending
        except AxonError:
            return ""
        return f"; the coordinator waits for: {'; '.join(pending)}" if pending else ""


def _why_not(view: ModelView, ticket: Ticket) -> str:
    """Return why there is nothing to vote on. If members are missing, wait until the members have changed."""
    job = view.job
    if not view.valid(ticket):
        return ticket.why_void or "the membership changed"
    # No attempt is in progress. The reason names the missing members.
    reason = f"the job was waiting for {view.membership.waiting_for}"
    job.wait_until(
        lambda: None if view.valid(ticket) else True,
        job.timeout_s,
        lambda: f"step {ticket.step} is not begun",
        reminds=True,
    )
    return reason


def _aborted(view: ModelView, ticket: Ticket, reason: str) -> Decision:
    """Return the coordinator's decision, or an abort with `reason` once it has announced a new membership."""
    if view.valid(ticket):
        view.job.wait_until(
            lambda: True if view.stepping.decision_on(ticket) is not None or not view.valid(ticket) else None,
            view.job.timeout_s,
            lambda: f"a shard server reports that step {ticket.step} is over; the coordinator does not",
        )
    return view.stepping.decision_on(ticket) or Decision(
        step=ticket.step,
        generation=ticket.generation,
        outcome=Outcome.ABORT,
        version=view.latest_version,
        reason=reason,
        model=view.model,
    )
