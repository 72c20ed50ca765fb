"""The actions of the state machine: the shell performs them in the order given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axon_ps.errors import AxonError
from axon_ps.storage.state_store.base import Record
from axon_ps.wire.events import ServerEvent


@dataclass(frozen=True)
class Persist:
    """Make these records durable before any later action is performed."""

    records: tuple[Record, ...]


@dataclass(frozen=True)
class SendEvent:
    """Send an event to sessions."""

    sessions: tuple[int, ...]
    event: ServerEvent


@dataclass(frozen=True)
class Reply:
    """Answer a call, with a result or an error."""

    call: int
    result: object


@dataclass(frozen=True)
class CloseSession:
    """End a session; with an error, unless the member has left."""

    session: int
    error: AxonError | None = None


@dataclass(frozen=True)
class Happened:
    """Record an event in the history; see `history.History.happened`."""

    kind: str
    text: str


Action = Persist | SendEvent | Reply | CloseSession | Happened


class Outbox:
    """Collects the actions that one event causes. The records come first, independent of the order of the calls."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._actions: list[Action] = []

    def persist(self, records: Iterable[Record]) -> None:
        """Write records. A later record of a key replaces an earlier one."""
        for record in records:
            self._records[record.key] = record

    def push(self, sessions: Iterable[int | None], event: ServerEvent) -> None:
        """Send an event to sessions (None: a member without a stream at present)."""
        if there := tuple(s for s in sessions if s is not None):
            self._actions.append(SendEvent(there, event))

    def reply(self, call: int, result: object) -> None:
        """Answer a call."""
        self._actions.append(Reply(call, result))

    def close(self, session: int | None, error: AxonError | None = None) -> None:
        """End a session."""
        if session is not None:
            self._actions.append(CloseSession(session, error))

    def happened(self, kind: str, text: str) -> None:
        """Record an event in the history."""
        self._actions.append(Happened(kind, text))

    def take(self) -> list[Action]:
        """Return all collected actions, and clear them."""
        actions, self._actions = self._actions, []
        if self._records:
            actions.insert(0, Persist(tuple(self._records.values())))
            self._records = {}
        return actions
