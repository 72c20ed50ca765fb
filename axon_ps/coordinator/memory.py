"""What a member remembers of its session, so that a broken stream loses nothing and repeats nothing. Pure.

Note: [Once, in order]
    After a reconnect the coordinator says first what may have been missed, then who is there; so everything it says is
    either news or known, and the known is dropped here. What *we* said last may be lost with the stream: it is said
    again while it is current. A vote of a generation that ended without a decision can have none any more, so it is an
    abort; for shard servers this cannot happen, since every step they are part of is decided before its generation ends
    and they miss at most the two newest decisions (a step cannot be decided without them).
"""

from __future__ import annotations

from axon_ps.coordinator.events import Event, JobState, Ready, RestoreOrder, ServerEvent, SnapshotOrder, Vote, Welcome
from axon_ps.coordinator.messages import ready_to_proto, vote_to_proto
from axon_ps.errors import InternalError
from axon_ps.types import Decision, Membership, Outcome
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
        self._word: Vote | Ready | None = None
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
                self._decided(event.step)
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

    def say(self, word: Vote | Ready) -> list[Event]:
        """Remember a vote or a sum of ours; an abort if its generation is over already."""
        self._word = word
        return [] if self.membership is None else self._settle(self.membership)

    def to_repeat(self) -> list[session_pb2.SessionRequest]:
        """What to say again on a new stream, once the membership has been heard."""
        said = [m for m in (self.initialized, self.restore_report) if m is not None]
        return said if self._word is None else [*said, word_to_proto(self._word)]

    def _hear_membership(self, event: Membership) -> list[Event]:
        known = self.membership
        if known is not None and event.generation < known.generation:
            raise InternalError(f"the coordinator speaks of generation {event.generation} after {known.generation}")
        events = self._settle(event)
        self.membership = event
        return events if event == known else [*events, event]

    def _settle(self, membership: Membership) -> list[Event]:
        """See that a word of a generation that is over is forgotten, and that a vote among them has its decision."""
        word = self._word
        if word is None or word.generation >= membership.generation:
            return []
        self._word = None
        if not isinstance(word, Vote) or word.step <= self._step:
            return []
        self._decided(word.step)
        return [
            Decision(
                step=word.step,
                generation=word.generation,
                outcome=Outcome.ABORT,
                version=membership.version,
                reason=f"generation {word.generation} ended before the step was decided",
                next_generation=membership.generation,
            )
        ]

    def _decided(self, step: int) -> None:
        self._step = step
        if self._word is not None and self._word.step <= step:
            self._word = None


def word_to_proto(word: Vote | Ready) -> session_pb2.SessionRequest:
    """A vote or a sum as a message."""
    return vote_to_proto(word) if isinstance(word, Vote) else ready_to_proto(word)
