"""What a member remembers of its session, so that a broken stream loses nothing and repeats nothing. Pure.

Note: [Once, in order]
    After a reconnect the coordinator says first what may have been missed, then who is there; so everything it says is
    either news or known, and the known is dropped here. What *we* said last may be lost with the stream: it is said
    again while it is current. A vote of a generation that ended without a decision can have none any more, so it is an
    abort; for shard servers this cannot happen, since every step they are part of is decided before its generation ends
    and they miss at most the two newest decisions (a step cannot be decided without them), or the newest one of each
    replica where replicas step alone.

Note: [Words of one replica alone]
    Where each replica's gradient is a step of its own, a shard server may have said that several are there, so words
    are kept per replica. Their `step` is the replica's clock, and what settles them is a decision with that replica's
    turn, or one that ends the generation for all.
"""

from __future__ import annotations

from axon_ps.coordinator.events import Event, JobState, Ready, RestoreOrder, ServerEvent, SnapshotOrder, Vote, Welcome
from axon_ps.coordinator.messages import ready_to_proto, vote_to_proto
from axon_ps.errors import InternalError
from axon_ps.types import Decision, Membership, Outcome, Turn
from axon_ps.wire.v1 import session_pb2


class Memory:
    """One member's memory of its session.

    Attributes:
        membership: the newest one; None before the first.
        job_state: the newest one; None before the first.
        initialized: our newest word that we hold our parameters.
        restore_report: our newest word that we could not restore.
    """

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.job_state: JobState | None = None
        self.initialized: session_pb2.SessionRequest | None = None
        self.restore_report: session_pb2.SessionRequest | None = None
        self._state_id = ""
        self._words: dict[int | None, Vote | Ready] = {}  # by replica; None: of all together
        self._step = -1
        self._snapshot_id = 0
        self._epoch = 0

    def hear(self, event: ServerEvent) -> list[Event]:
        """What is new in an event, in order.

        Raises:
            InternalError: the coordinator has lost its state.
        """
        if isinstance(event, Membership):
            return self._hear_membership(event)
        if isinstance(event, JobState):
            news = event != self.job_state
            self.job_state = event
        elif isinstance(event, Decision):
            # Who has not been told of any membership is a new process: what was decided before is not its business.
            news = self.membership is not None and event.step > self._step
            if news:
                self._decided(event)
        elif isinstance(event, SnapshotOrder):
            news, self._snapshot_id = event.id > self._snapshot_id, max(event.id, self._snapshot_id)
        elif isinstance(event, RestoreOrder):
            news, self._epoch = event.epoch > self._epoch, max(event.epoch, self._epoch)
        else:
            assert isinstance(event, Welcome)
            if self._state_id not in ("", event.state_id):
                raise InternalError(
                    "the coordinator came back without the state it had, so the job cannot go on with it (was it "
                    "restarted with another state file, or with none?)"
                )
            self._state_id = event.state_id
            return []
        return [event] if news else []

    def say(self, word: Vote | Ready, replica: int | None = None) -> list[Event]:
        """Remember a vote or a sum of ours, of `replica` alone or of all; an abort if its generation is over."""
        self._words[replica] = word
        return [] if self.membership is None else self._settle(self.membership)

    def to_repeat(self) -> list[session_pb2.SessionRequest]:
        """What to say again on a new stream, once the membership has been heard."""
        said = [m for m in (self.initialized, self.restore_report) if m is not None]
        return [*said, *map(word_to_proto, self._words.values())]

    def _hear_membership(self, event: Membership) -> list[Event]:
        known = self.membership
        if known is not None and event.generation < known.generation:
            raise InternalError(f"the coordinator speaks of generation {event.generation} after {known.generation}")
        events = self._settle(event)
        self.membership = event
        return events if event == known else [*events, event]

    def _settle(self, membership: Membership) -> list[Event]:
        """See that a word of a generation that is over is forgotten, and that a vote among them has its decision."""
        aborts: list[Event] = []
        for replica, word in list(self._words.items()):
            if word.generation >= membership.generation:
                continue
            del self._words[replica]
            if not isinstance(word, Vote) or (replica is None and word.step <= self._step):
                continue
            turn = None if replica is None else Turn(replica=replica, clock=word.step, slowest_clock=0)
            abort = Decision(
                step=word.step if turn is None else self._step,
                generation=word.generation,
                outcome=Outcome.ABORT,
                version=membership.version,
                reason=f"generation {word.generation} ended before the step was decided",
                next_generation=membership.generation,
                turn=turn,
            )
            # It used up its step only if the coordinator says so: a vote cast while members were missing is of none.
            self._step = max(self._step, min(abort.step, membership.step - 1))
            aborts.append(abort)
        return aborts

    def _decided(self, decision: Decision) -> None:
        """Forget the words that a decision settles."""
        self._step = decision.step
        turn = decision.turn
        for replica, word in list(self._words.items()):
            if replica is None:
                settled = word.step <= decision.step
            elif turn is None:
                settled = word.generation <= decision.generation
            else:
                settled = (word.generation, replica) == (decision.generation, turn.replica) and word.step <= turn.clock
            if settled:
                del self._words[replica]


def word_to_proto(word: Vote | Ready) -> session_pb2.SessionRequest:
    """A vote or a sum as a message."""
    return vote_to_proto(word) if isinstance(word, Vote) else ready_to_proto(word)
