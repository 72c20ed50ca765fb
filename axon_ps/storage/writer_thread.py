"""A thread that hashes and writes blocks, so that the caller is done with its values once they are copied.

Note: [Copied, then written]
    A step that follows a checkpoint's version may change a slice only when its values have been read (see "Apply and
    snapshot" in `shard.server.apply`). Reading them at the speed of memory instead of the storage's makes that wait
    short: values are copied into blocks, at most `BUFFER_BYTES` in all, and this thread hashes and writes the blocks,
    at low priority. A caller with more values than that waits until blocks are free again. Meanwhile this thread does
    not rest.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from axon_ps.errors import CheckpointError, again
from axon_ps.host import priority
from axon_ps.storage.files import Sink
from axon_ps.types import Array

BLOCK_BYTES: Final = 4 << 20
"""Bytes that are hashed and written at a time."""

BUFFER_BYTES: Final = 1 << 30
"""Most memory that copies take."""

STALLED_S: Final = 600.0
"""Seconds that storage may take for one block before the file is given up."""


class WriterThread:
    """Writes the bytes that `put` copies, in order. It is made on the thread that calls `put`.

    Args:
        sink: the destination; used by this object's thread only until `finish` or `abandon` has returned.
        throttle: of hashing and writing.
        buffer_bytes: most memory that copies take.
        stalled_s: seconds that storage may take for one block.
    """

    def __init__(
        self,
        sink: Sink,
        throttle: priority.Throttle = priority.UNTHROTTLED,
        buffer_bytes: int = BUFFER_BYTES,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._sink = sink
        self._throttle = throttle
        self._most_blocks = max(1, buffer_bytes // BLOCK_BYTES)
        self._stalled_s = stalled_s
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._changed = threading.Condition()
        self._full: deque[tuple[Array, int]] = deque()  # block, and how many bytes of it are used
        self._open: Array | None = None  # the block that is being filled, and how far it is
        self._used = 0
        self._free: list[Array] = []
        self._blocks = 0
        self._wanted = False  # True while the caller of `put` waits for a block
        self._written = 0
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="axon_ps-checkpoint", daemon=True)
        self._thread.start()

    def put(self, data: memoryview | bytes) -> None:
        """Copy a contiguous buffer of bytes. It may change from now on.

        Raises:
            OSError: an earlier block of a local file could not be written.
            CheckpointError: an earlier block could not be written, or storage has stalled.
        """
        view = memoryview(data)
        while len(view):
            if self._open is None:
                self._open, self._used = self._block(), 0
            count = min(len(view), BLOCK_BYTES - self._used)
            self._open[self._used : self._used + count] = view[:count]
            self._used += count
            view = view[count:]
            if self._used == BLOCK_BYTES:
                self._hand_over()

    def finish(self) -> tuple[str, int]:
        """Wait until everything is written; returns its SHA-256 in hex, and its number of bytes.

        Raises:
            OSError: a block of a local file could not be written.
            CheckpointError: a block could not be written, or storage has stalled.
        """
        self._hand_over()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            self._wait_while(lambda: not self._error and self._thread.is_alive() and bool(self._full))
            self._check()
        self._thread.join(self._stalled_s)
        with self._changed:
            self._check()
        return self._hash.hexdigest(), self._bytes

    def abandon(self) -> None:
        """Stop writing; returns when the thread has ended, unless storage has stalled."""
        with self._changed:
            self._ends = True
            self._full.clear()
            self._changed.notify_all()
            moves = not isinstance(self._error, _Stalled)
        self._thread.join(self._stalled_s if moves else 0.0)

    def _hand_over(self) -> None:
        """Queue the block that was filled for writing."""
        if self._open is not None:
            with self._changed:
                self._full.append((self._open, self._used))
                self._changed.notify_all()
            self._open = None

    def _block(self) -> Array:
        """Return a free block; waits for it."""
        with self._changed:
            self._check()
            if not self._free and self._blocks < self._most_blocks:
                self._blocks += 1
                return np.empty(BLOCK_BYTES, np.uint8)
            self._wanted = not self._free
            self._wait_while(lambda: not self._error and not self._free)
            self._check()
            return self._free.pop()

    def _wait_while(self, waiting: Callable[[], bool]) -> None:
        """Wait, with the lock, while `waiting()` and blocks are written. Stalled storage is an error."""
        deadline, written = time.monotonic() + self._stalled_s, self._written
        while waiting():
            if self._written != written:
                deadline, written = time.monotonic() + self._stalled_s, self._written
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                self._error = _Stalled(
                    f"storage has taken nothing for {self._stalled_s:g} s; the file was given up, see to the storage"
                )

    def _check(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _run(self) -> None:
        priority.lower()
        try:
            while (taken := self._next()) is not None:
                block, used = taken
                began_s = time.monotonic()
                view = memoryview(block)[:used]  # type: ignore[arg-type]
                self._hash.update(view)
                self._sink.write(view)
                self._bytes += used
                with self._changed:
                    self._written += 1
                    self._full.popleft()
                    self._free.append(block)
                    self._changed.notify_all()
                    somebody_waits, self._wanted = self._wanted, False
                if not somebody_waits:
                    self._throttle.rest(time.monotonic() - began_s)
        except BaseException as error:
            with self._changed:
                self._error = self._error or again(error)
                self._changed.notify_all()

    def _next(self) -> tuple[Array, int] | None:
        """Return the oldest block, which stays in the queue until it is written; None at the end."""
        with self._changed:
            while not self._full and not self._ends:
                self._changed.wait()
            return self._full[0] if self._full else None


class _Stalled(CheckpointError):
    """Storage has stalled."""
