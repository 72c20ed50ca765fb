"""Attachments of this worker to the job's checkpoints, and the attachments of a restored checkpoint.

They are in the coordinator's key-value store (`coordinator.attachments`), so a worker needs no access to the
checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from axon_ps.coordinator.attachments import Attachment, Header, block_keys, header_key
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import InvalidRequest
from axon_ps.rpc.background_loop import BackgroundLoop

_READS = 3
"""Most reads of an attachment that is replaced meanwhile."""


class Attachments:
    """The attachments of one worker; thread-safe.

    Args:
        loop: the background loop.
        coordinator: the session.
        timeout_s: deadline of every operation, in seconds.
    """

    def __init__(self, loop: BackgroundLoop, coordinator: CoordinatorClient, timeout_s: float) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sources: dict[str, Callable[[], bytes | None]] = {}

    def register(self, key: str, source: Callable[[], bytes | None]) -> None:
        """Have `source` called for the content of `key` when this worker orders a checkpoint; None = no content."""
        with self._lock:
            self._sources[key] = source

    def forget(self, key: str) -> None:
        """Forget the source of a key."""
        with self._lock:
            self._sources.pop(key, None)

    def current(self) -> dict[str, Attachment]:
        """Return the present content of all sources, by key.

        Raises:
            InvalidRequest: one is too large.
        """
        with self._lock:
            sources = list(self._sources.items())
        found = ((key, source()) for key, source in sources)
        return {key: Attachment.made(key, content) for key, content in found if content is not None}

    async def store(self, key: str, attachment: Attachment) -> None:
        """Store an attachment; to be run on the loop.

        After an error: the store has the old content, or the new.
        """
        put, get = self._coordinator.kv_put, self._coordinator.kv_get
        present = Header.of(await get(header_key(key), timeout_s=self._timeout_s))
        for name, value in attachment.beside(present).values(key):
            await put(name, value, timeout_s=self._timeout_s)

    def attach(self, key: str, content: bytes | Attachment) -> None:
        """Store content, and return when the next checkpoint has it.

        Raises:
            InvalidRequest: it is too large.
            Busy: the store is full.
        """
        attachment = Attachment.made(key, content) if isinstance(content, bytes) else content
        self._loop.run(self.store(key, attachment), self._timeout_s)

    def offer(self, key: str, content: bytes) -> Any:
        """Store content in the background; return the future."""
        return self._loop.submit(self.store(key, Attachment.made(key, content)))

    def remove(self, key: str) -> None:
        """Remove an attachment. Later checkpoints do not have it."""
        self._loop.run(self._coordinator.kv_delete(header_key(key), self._timeout_s), self._timeout_s)

    def header(self, key: str) -> Header:
        """Return the header of an attachment; one without blocks if there is none."""
        return Header.of(self._loop.run(self._coordinator.kv_get(header_key(key), self._timeout_s), self._timeout_s))

    def read(self, key: str) -> bytes | None:
        """Return the content of an attachment; None if there is none.

        Raises:
            InvalidRequest: it is damaged.
        """
        for left in reversed(range(_READS)):
            stored = self._loop.run(self._stored(key), self._timeout_s)
            if stored is None:
                return None
            try:
                return stored.content()  # in this thread: it may take a second, in which the loop sends heartbeats
            except InvalidRequest:  # it was replaced twice meanwhile
                if not left:
                    raise
        return None

    async def _stored(self, key: str) -> Attachment | None:
        header = Header.of(await self._coordinator.kv_get(header_key(key), timeout_s=self._timeout_s))
        if not header.blocks:
            return None
        keys = block_keys(key, header)
        blocks = [await self._coordinator.kv_get(k, timeout_s=self._timeout_s) or b"" for k in keys]
        return Attachment(header=header, blocks=blocks)
