"""Records are written in spite of a full disk, and any other failure is the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from axon_ps.coordinator.server.shell import RecordWriter
from axon_ps.errors import StorageFull
from axon_ps.storage.state_store import MemoryStateStore, Record


class FailingStore(MemoryStateStore):
    """A store that fails with these errors, one after the other, and then works."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.troubles: list[str] = []
        self.writer: RecordWriter | None = None

    def apply(self, records: Sequence[Record]) -> None:
        assert self.writer is not None
        self.troubles.append(self.writer.trouble)
        if self.errors:
            raise self.errors.pop(0)
        super().apply(records)


def write(store: FailingStore) -> RecordWriter:
    store.writer = writer = RecordWriter(store, retry_s=0.0)
    try:
        asyncio.run(writer.apply([Record(key="k", value=b"v")]))
    finally:
        writer.close()
    return writer


def test_a_full_disk_is_tried_again_and_named_until_then() -> None:
    store = FailingStore(StorageFull("no space"), StorageFull("no space"))
    assert write(store).trouble == ""
    assert store.load() == {"k": b"v"}
    assert store.troubles[0] == ""
    assert all("no space" in trouble for trouble in store.troubles[1:])


def test_another_failure_is_not_tried_again() -> None:
    store = FailingStore(OSError("the disk is gone"))
    with pytest.raises(OSError, match="is gone"):
        write(store)
    assert len(store.troubles) == 1
