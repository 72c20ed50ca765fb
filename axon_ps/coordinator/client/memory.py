"""What a member remembers of its session, so that a broken stream loses nothing and repeats nothing. Pure.

Note: [Once, in order]
    After a reconnect the coordinator says first what may have been missed, then who is there; so everything it says is
    either news or known, and the known is dropped here. What *we* said last may be lost with the stream: it is said
    again while it is current. A vote of a generation that ended without a decision can have none any more, so it is an
    abort; for shard servers this cannot happen, since every step they are part of is decided before its generation ends
    and they miss at most the two newest decisions (a step cannot be decided without them), or the newest one of each
    replica where replicas step alone.

Note: [Several models]
    Each model has decisions, restores and words of its own. A model that was released while the stream was broken is
    named in the Welcome; nothing is said of it any more.

Note: [Words of one replica alone]
    Where each replica's gradient is a step of its own, a shard server may have said that several are there, so words
    are kept per replica. Their `step` is the replica's clock, and what settles them is a decision with that replica's
    turn, or one that ends the generation for all.
"""

from __future__ import annotations

from axon_ps.coordinator.core.events import (
    Event,
    JobState,
    Ready,
    RestoreOrder,
    ServerEvent,
    SnapshotOrder,
    Vote,
    Welcome,
)
from axon_ps.coordinator.messages import ready_to_proto, vote_to_proto
from axon_ps.errors import InternalError
from axon_ps.types import Decision, Membership, Outcome, Turn
from axon_ps.wire.v1 import session_pb2


class _ModelMemory:
    """What is remembered of one model.

    Attributes:
        state: the newest one; None before the first.
        initialized: our newest word that we hold its parameters.
        restore_report: our newest word that we could not restore it.
        words: what we said last, by replica; None: of all together.
        step: the newest decided.
        epoch: of the newest restore order.
    """

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.initialized: session_pb2.SessionRequest | None = None
        self.restore_report: session_pb2.SessionRequest | None = None
        self.words: dict[int | None, Vote | Ready] = {}
        self.step = -1
        self.epoch = 0


class Memory:
    """One member's memory of its session.

    Attributes:
        membership: the newest one; None before the first.
    """

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self._models: dict[int, _ModelMemory] = {}
        self._released: set[int] = set()
        self._state_id = ""
        self._snapshot_id = 0

    def _of(self, model: int) -> _ModelMemory:
        return self._models.setdefault(model, _ModelMemory())

    @property
    def job_state(self) -> JobState | None:
        """The newest one of the first model; None before the first."""
        return self._of(0).state

    def hear(self, event: ServerEvent) -> list[Event]:
        """What is new in an event, in order.

        Raises:
            InternalError: the coordinator has lost its state.
        """
        if isinstance(event, Membership):
            return self._hear_membership(event)
        if isinstance(event, JobState) and event.released:
            news = event.model not in self._released
            self._released.add(event.model)
            self._models.pop(event.model, None)
        elif isinstance(event, JobState):
            news = event != self._of(event.model).state
            self._of(event.model).state = event
        elif isinstance(event, Decision):
            # Who has not been told of any membership is a new process: what was decided before is not its business.
            news = self.membership is not None and event.step > self._of(event.model).step
            if news:
                self._decided(event)
        elif isinstance(event, SnapshotOrder):
            news, self._snapshot_id = event.id > self._snapshot_id, max(event.id, self._snapshot_id)
        elif isinstance(event, RestoreOrder):
            model = self._of(event.model)
            news, model.epoch = event.epoch > model.epoch, max(event.epoch, model.epoch)
        else:
            assert isinstance(event, Welcome)
            if self._state_id not in ("", event.state_id):
                raise InternalError(
                    "the coordinator came back without the state it had, so the job cannot go on with it (was it "
                    "restarted with another state file, or with none?)"
                )
            self._state_id = event.state_id
            gone = [JobState(model=number, released=True) for number in event.released]
            return [each for state in gone for each in self.hear(state)]
        return [event] if news else []

    def say_initialized(self, message: session_pb2.SessionRequest) -> None:
        """Remember that we hold the parameters of a model."""
        self._of(message.initialized.model).initialized = message

    def say_not_restored(self, message: session_pb2.SessionRequest) -> None:
        """Remember that we could not restore a model."""
        self._of(message.restore.model).restore_report = message

    def say(self, word: Vote | Ready, replica: int | None = None) -> list[Event]:
        """Remember a vote or a sum of ours, of `replica` alone or of all; an abort if its generation is over."""
        self._of(word.model).words[replica] = word
        return [] if self.membership is None else self._settle(self.membership)

    def to_repeat(self) -> list[session_pb2.SessionRequest]:
        """What to say again on a new stream, once the membership has been heard."""
        models = self._models.values()
        said = [m for model in models for m in (model.initialized, model.restore_report) if m is not None]
        return [*said, *(word_to_proto(word) for model in models for word in model.words.values())]

    def _hear_membership(self, event: Membership) -> list[Event]:
        known = self.membership
        if known is not None and event.generation < known.generation:
            raise InternalError(f"the coordinator speaks of generation {event.generation} after {known.generation}")
        events = self._settle(event)
        self.membership = event
        return events if event == known else [*events, event]

    def _settle(self, membership: Membership) -> list[Event]:
        """See that a word of a generation that is over is forgotten, and that a vote among them has its decision."""
        return [abort for number in self._models for abort in self._settle_model(number, membership)]

    def _settle_model(self, number: int, membership: Membership) -> list[Event]:
        model, (first_step, version) = self._models[number], membership.progress(number)
        aborts: list[Event] = []
        for replica, word in list(model.words.items()):
            if word.generation >= membership.generation:
                continue
            del model.words[replica]
            if not isinstance(word, Vote) or (replica is None and word.step <= model.step):
                continue
            turn = None if replica is None else Turn(replica=replica, clock=word.step, slowest_clock=0)
            abort = Decision(
                step=word.step if turn is None else model.step,
                generation=word.generation,
                outcome=Outcome.ABORT,
                version=version,
                reason=f"generation {word.generation} ended before the step was decided",
                next_generation=membership.generation,
                turn=turn,
                model=number,
            )
            # It used up its step only if the coordinator says so: a vote cast while members were missing is of none.
            model.step = max(model.step, min(abort.step, first_step - 1))
            aborts.append(abort)
        return aborts

    def _decided(self, decision: Decision) -> None:
        """Forget the words that a decision settles."""
        model = self._of(decision.model)
        model.step = decision.step
        turn = decision.turn
        for replica, word in list(model.words.items()):
            if replica is None:
                settled = word.step <= decision.step
            elif turn is None:
                settled = word.generation <= decision.generation
            else:
                settled = (word.generation, replica) == (decision.generation, turn.replica) and word.step <= turn.clock
            if settled:
                del model.words[replica]


def word_to_proto(word: Vote | Ready) -> session_pb2.SessionRequest:
    """A vote or a sum as a message."""
    return vote_to_proto(word) if isinstance(word, Vote) else ready_to_proto(word)
