"""Writes records to the coordinator's store, in a thread if that may take a while; a full disk delays them."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from axon_ps.coordinator.core.restart.knowledge import Knowledge, learned
from axon_ps.errors import StorageFull
from axon_ps.storage.state_store.base import Record, StateStore

_logger = logging.getLogger(__name__)


class RecordWriter:
    """The way to one store, which belongs to the caller. Calls of its coroutines do not overlap.

    Args:
        store: gets the records.
        retry_s: seconds before a full disk is tried again.

    Attributes:
        trouble: the reason for which records wait; empty while there is none.
    """

    def __init__(self, store: StateStore, retry_s: float) -> None:
        self._store = store
        self._retry_s = retry_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="axon_ps-state")
        self.trouble = ""

    async def apply(self, records: list[Record]) -> None:
        """Return when the records are written."""
        while records:
            try:
                if self._store.blocks:
                    await asyncio.get_running_loop().run_in_executor(self._executor, self._store.apply, records)
                else:
                    self._store.apply(records)
                if self.trouble:
                    _logger.warning("the coordinator's state can be written again")
                self.trouble = ""
                return
            except StorageFull as error:
                self.trouble = f"nothing can be decided before there is space on the disk: {error}"
                _logger.error("%s", self.trouble)
                await asyncio.sleep(self._retry_s)

    async def learn(self, known: Knowledge) -> None:
        """Add a shard server's newer knowledge to the records."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._learn, known)

    def _learn(self, known: Knowledge) -> None:
        self._store.apply(learned(self._store.load(), known))

    def close(self) -> None:
        """End the thread, after the write under way."""
        self._executor.shutdown()
