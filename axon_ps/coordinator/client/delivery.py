"""Exactly-once delivery over a session: a broken stream loses no message and repeats no event. Pure.

Note: [Once, in order]
    After a reconnect the coordinator first sends the events that may have been missed, then the membership. Events that
    this member already has are dropped here. A message of *ours* may have been lost with the stream, so it is sent
    again while it is current. A vote of a generation that ended without a decision can get none any more, so its step
    counts as aborted. This cannot happen to shard servers, since every step that they report on is decided before its
    generation ends. A step cannot be decided without them, so they miss at most the two newest decisions. With
    asynchronous replicas, they miss at most the newest one of each replica.

Note: [Several models]
    Each model has its own decisions, restores and messages. A model that was released while the stream was broken is
    named in the Welcome. Nothing is sent about it any more.

Note: [Knowledge]
    The received events are also sent to a coordinator whose state is older; see `coordinator.core.restart.knowledge`.

Note: [Asynchronous steps]
    If each replica's gradient is a step of its own, a shard server may have reported several of them, so messages are
    kept per replica. Their `step` is the replica's clock. They are settled by a decision on that replica, or by a
    decision that ends the generation for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from axon_ps.coordinator.core.records import retained
from axon_ps.coordinator.core.registration import optimizer_after
from axon_ps.coordinator.core.restart.knowledge import Knowledge, ModelKnowledge
from axon_ps.coordinator.messages import step_message_to_proto
from axon_ps.errors import InternalError, Misuse
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, Membership, OptimizerSpec, Outcome, ReplicaClock
from axon_ps.wire.events import (
    Event,
    JobState,
    ModelPosition,
    Position,
    Ready,
    RestoreOrder,
    ServerEvent,
    SnapshotOrder,
    Vote,
    VoteRequest,
    Welcome,
)
from axon_ps.wire.v1 import session_pb2


class _ModelDelivery:
    """The delivery state of one model.

    Attributes:
        state: the newest one; None before the first.
        initialized: our newest report that we hold its parameters.
        restore_report: our newest report that we could not restore it.
        out_of_memory: our newest report that we cannot hold it.
        corrupted: by slice, our newest report that its values are lost.
        corrupted_sums: by slice, our newest report that a sum of the step under way is lost.
        messages: our newest vote or report, by replica; None = of all replicas together.
        step: the newest decided.
        version: committed steps.
        decisions: the newest.
        changes: the decisions with another optimizer, since the newest state with an optimizer.
        spec, optimizer: the newest from a state; None = no state had one.
        restore: the newest order to restore it.
    """

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.initialized: session_pb2.SessionRequest | None = None
        self.restore_report: session_pb2.SessionRequest | None = None
        self.out_of_memory: session_pb2.SessionRequest | None = None
        self.corrupted: dict[int, session_pb2.SessionRequest] = {}
        self.corrupted_sums: dict[int, session_pb2.SessionRequest] = {}
        self.messages: dict[int | None, Vote | Ready] = {}
        self.step = -1
        self.version = 0
        self.decisions: list[Decision] = []
        self.changes: list[Decision] = []
        self.spec: JobSpec | None = None
        self.optimizer: OptimizerSpec | None = None
        self.restore: RestoreOrder | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the newest restore order."""
        return 0 if self.restore is None else self.restore.epoch

    def set_state(self, state: JobState) -> None:
        """Take a state; only some states have layout and optimizer."""
        if self.state is None or state.epoch != self.state.epoch:
            self.version = state.version
        self.state, self.spec = state, state.spec or self.spec
        if state.optimizer is not None:
            self.optimizer, self.changes = state.optimizer, []

    def decided(self, decision: Decision) -> None:
        """Take a new decision."""
        self.step, self.version = decision.step, decision.version
        self.decisions = retained(self.decisions, decision)
        if decision.optimizer is not None:
            self.changes.append(decision)

    def position(self, number: int, first_step: int) -> ModelPosition:
        """Return the newest known position, in a generation that begins with `first_step`."""
        state, placement = self.state, None if self.state is None else self.state.placement
        return ModelPosition(
            model=number,
            epoch=max(self.epoch, 0 if state is None else state.epoch),
            initialized=state is not None and state.initialized and state.epoch >= self.epoch,
            optimized=self.optimizer is not None,
            step=max(first_step, self.step + 1),
            version=self.version,
            placement=0 if placement is None else placement.number,
        )

    def knowledge(self, first_step: int) -> ModelKnowledge | None:
        """Return all knowledge of the model; None if its layout is unknown."""
        if self.state is None or self.spec is None:
            return None
        optimizer, committed = self.optimizer, dict(self.state.committed)
        for decision in self.changes:
            optimizer = None if optimizer is None else optimizer_after(optimizer, decision)
        for decision in self.decisions:
            committed |= decision.commit if decision.version > self.state.version else {}
        return ModelKnowledge(
            state=replace(self.state, spec=self.spec, optimizer=optimizer, version=self.version, committed=committed),
            step=max(first_step, self.step + 1),
            decisions=tuple(self.decisions),
            restore=self.restore,
        )


class Delivery:
    """The delivery state of one member's session.

    Attributes:
        membership: the newest one; None before the first.
    """

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self._models: dict[int, _ModelDelivery] = {}
        self._released: set[int] = set()
        self._snapshot_id = 0

    def _of(self, model: int) -> _ModelDelivery:
        return self._models.setdefault(model, _ModelDelivery())

    @property
    def job_state(self) -> JobState | None:
        """The newest one of the first model; None before the first."""
        return self._of(0).state

    def receive(self, event: ServerEvent) -> list[Event]:
        """Take an event; return the new events in it, in order.

        Raises:
            InternalError: the coordinator has announced a later generation before.
        """
        if isinstance(event, Membership):
            return self._receive_membership(event)
        if isinstance(event, JobState) and event.released:
            is_new = event.model not in self._released
            self._released.add(event.model)
            self._models.pop(event.model, None)
        elif isinstance(event, JobState):
            is_new = event != self._of(event.model).state
            self._of(event.model).set_state(event)
        elif isinstance(event, Decision):
            # Without a membership this is a new process, which ignores earlier decisions, now and after a reconnect.
            known = self.membership
            is_new = known is not None and event.step > max(
                self._of(event.model).step, known.progress(event.model)[0] - 1
            )
            if is_new:
                self._decided(event)
        elif isinstance(event, VoteRequest):
            is_new = True
        elif isinstance(event, SnapshotOrder):
            is_new, self._snapshot_id = event.id > self._snapshot_id, max(event.id, self._snapshot_id)
        elif isinstance(event, RestoreOrder):
            model = self._of(event.model)
            if is_new := event.epoch > model.epoch:
                model.restore = event
        else:
            assert isinstance(event, Welcome)
            gone = [JobState(model=number, released=True) for number in event.released]
            return [each for state in gone for each in self.receive(state)]
        return [event] if is_new else []

    @property
    def position(self) -> Position:
        """The newest position of the job that this member knows."""
        members = self.membership
        if members is None:
            return Position()
        return Position(
            generation=members.generation,
            models=tuple(
                model.position(number, members.progress(number)[0])
                for number, model in sorted(self._models.items())
                if model.state is not None and model.state.placement is not None
            ),
            released=frozenset(self._released),
            snapshot_id=self._snapshot_id,
        )

    def knowledge(self, revoked: Mapping[str, str]) -> Knowledge:
        """Return all that this member knows of the job, with the names that are `revoked`.

        Raises:
            Misuse: it was never a member.
        """
        if self.membership is None:
            raise Misuse("a process that has been no member of the job knows nothing of it")
        found = (m.knowledge(self.membership.progress(n)[0]) for n, m in sorted(self._models.items()))
        return Knowledge(
            membership=self.membership,
            models=tuple(model for model in found if model is not None),
            released=frozenset(self._released),
            snapshot_id=self._snapshot_id,
            revoked=revoked,
        )

    def record_initialized(self, message: session_pb2.SessionRequest) -> None:
        """Record our report that we hold the parameters of a model."""
        model = self._of(message.initialized.model)
        model.initialized, model.out_of_memory = message, None
        model.corrupted.clear()

    def record_out_of_memory(self, message: session_pb2.SessionRequest) -> None:
        """Record our report that we have no memory for our slices of a model."""
        self._of(message.no_room.model).out_of_memory = message

    def record_corrupted(self, message: session_pb2.SessionRequest) -> None:
        """Record our report that memory of a slice failed.

        Lost values count until they are copied, lost sums until their step is over.
        """
        model = self._of(message.corrupted.model)
        reports = model.corrupted if message.corrupted.lost else model.corrupted_sums
        reports[message.corrupted.slice] = message

    def record_copied(self, message: session_pb2.SessionRequest) -> None:
        """Record our report that slices were received. If it is lost, they are copied again."""
        for number in message.copied.slices:
            self._of(message.copied.model).corrupted.pop(number, None)

    def record_restore_failure(self, message: session_pb2.SessionRequest) -> None:
        """Record our report that we could not restore a model."""
        self._of(message.restore.model).restore_report = message

    def record(self, message: Vote | Ready, replica: int | None = None) -> list[Event]:
        """Record our vote or report, of one `replica` or of all; return an abort if its generation is over."""
        self._of(message.model).messages[replica] = message
        return [] if self.membership is None else self._settle(self.membership)

    def to_resend(self) -> list[session_pb2.SessionRequest]:
        """Return the messages to send again on a new stream, after the membership has been received."""
        models = self._models.values()
        reports = list[session_pb2.SessionRequest]()
        for model in models:
            made = (model.initialized, model.restore_report, model.out_of_memory)
            reports += [report for report in made if report is not None]
        for model in models:
            reports += [*model.corrupted.values(), *model.corrupted_sums.values()]
        return [*reports, *(step_message_to_proto(message) for model in models for message in model.messages.values())]

    def _receive_membership(self, event: Membership) -> list[Event]:
        known = self.membership
        if known is not None and event.generation < known.generation:
            raise InternalError(f"the coordinator announces generation {event.generation} after {known.generation}")
        events = self._settle(event)
        if known is not None and event.generation == known.generation:  # a generation is immutable
            return events
        self.membership = event
        for number, model in self._models.items():
            model.version = event.progress(number)[1]
        return [*events, event]

    def _settle(self, membership: Membership) -> list[Event]:
        """Drop the messages of generations that are over; return an abort for every vote among them."""
        return [abort for number in self._models for abort in self._settle_model(number, membership)]

    def _settle_model(self, number: int, membership: Membership) -> list[Event]:
        model, (first_step, version) = self._models[number], membership.progress(number)
        for index, report in list(model.corrupted_sums.items()):
            if report.corrupted.generation < membership.generation:
                del model.corrupted_sums[index]
        aborts: list[Event] = []
        for replica, message in list(model.messages.items()):
            if message.generation >= membership.generation:
                continue
            del model.messages[replica]
            if not isinstance(message, Vote) or (replica is None and message.step <= model.step):
                continue
            of = None if replica is None else ReplicaClock(replica=replica, clock=message.step, slowest_clock=0)
            abort = Decision(
                step=message.step if of is None else model.step,
                generation=message.generation,
                outcome=Outcome.ABORT,
                version=version,
                reason=f"generation {message.generation} ended before the step was decided",
                next_generation=membership.generation,
                replica_clock=of,
                model=number,
            )
            # A vote while members were missing is of no step: it counts as one only if the membership's step is later.
            model.step = max(model.step, min(abort.step, first_step - 1))
            aborts.append(abort)
        return aborts

    def _decided(self, decision: Decision) -> None:
        """Drop the messages that a decision settles."""
        model = self._of(decision.model)
        model.decided(decision)
        model.corrupted_sums.clear()
        of = decision.replica_clock
        for replica, message in list(model.messages.items()):
            if replica is None:
                settled = message.step <= decision.step
            elif of is None:
                settled = message.generation <= decision.generation
            else:
                same = (message.generation, replica) == (decision.generation, of.replica)
                settled = same and message.step <= of.clock
            if settled:
                del model.messages[replica]
