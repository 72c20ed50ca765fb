"""Records in memory, for tests and for jobs that may end with their coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_ps.errors import Closed
from axon_ps.storage.state_store.base import Record, StateStore, register


@register("memory")
class MemoryStateStore(StateStore):
    """Records in memory: a coordinator with this store has no state after a restart."""

    blocks = False

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}
        self._closed = False

    @classmethod
    def open(cls, address: str) -> MemoryStateStore:
        """Make a store. It has no address."""
        return cls()

    def load(self) -> Mapping[str, bytes]:
        """Return everything stored."""
        self._check()
        return dict(self._records)

    def apply(self, records: Sequence[Record]) -> None:
        """Make the changes."""
        self._check()
        for record in records:
            if record.value is None:
                self._records.pop(record.key, None)
            else:
                self._records[record.key] = record.value

    @property
    def begin_anew(self) -> str:
        """See `StateStore.begin_anew`."""
        return "stop the coordinator, whose state is in its memory, and start it again"

    def close(self) -> None:
        """Refuse further use."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise Closed("this state store was closed")
