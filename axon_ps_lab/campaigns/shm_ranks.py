"""Ranks of a group on this host without a world: a store of files, and calls of the shared-memory backend."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.collectives.backends.base import Call, GroupContext, Operation
from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend
from axon_ps.errors import Timeout
from axon_ps.types import Array, DType, Member, Role

TIMEOUT_S = 120


class DirectoryStore:
    """A `GroupStore` of files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _file(self, key: str) -> Path:
        return self.path / key.replace("/", "%")

    def put(self, key: str, value: bytes) -> None:
        aside = self.path / f"aside-{os.getpid()}-{threading.get_ident()}"
        aside.write_bytes(value)
        aside.rename(self._file(key))

    def wait(self, key: str, timeout_s: float) -> bytes:
        deadline, nap = time.monotonic() + timeout_s, threading.Event()
        while True:
            try:
                return self._file(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise Timeout(f"nobody stored {key}") from None
                nap.wait(0.002)

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)


def context(store: Any, rank: int, n: int, *, name: str = "test", timeout_s: float = TIMEOUT_S) -> GroupContext:
    """Return the context of a rank. World ranks are positions + 10, so messages show which of the two they name."""
    members = tuple(Member(role=Role.WORKER, rank=10 + r, incarnation=f"{r:032x}", node="here") for r in range(n))
    return GroupContext(
        name=name, rank=rank, ranks=tuple(m.rank for m in members), members=members, store=store, timeout_s=timeout_s
    )


class Rank:
    """The backend of one rank, with its calls counted."""

    def __init__(self, backend: SharedMemoryBackend, registered: bool = False) -> None:
        self.backend, self.registered = backend, registered
        self.rank, self.n = backend.rank, backend.world_size
        self.calls = 0

    def call(self, operation: Operation, dtype: DType, counts: tuple[int, ...] = (), **rest: Any) -> Call:
        self.calls += 1
        return Call(sequence=self.calls - 1, operation=operation, dtype=dtype, counts=counts, **rest)

    def array(self, values: Array, dtype: DType) -> Array:
        """Return an array with these values, in shared memory if the rank's arrays are registered."""
        array = self.backend.empty_shared(values.shape, dtype) if self.registered else np.empty_like(values)
        array[:] = values
        return array
