"""Messages between GPUs: tags, any source and sizes that do not fit, on a transport that has only an order.

Owns: the agreement of both ends, in the group's store, on which message is transferred next. A sender announces a
message under its tag; the receiver that matches it replies "go" or "drop", and only after "go" both transfer it. The
module does not depend on GPUs: the function that moves bytes is passed to it.

Invariant: between two ranks one message is transferred at a time in each direction.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from axon_ps.collectives.backends.base import GroupContext, disagreement
from axon_ps.collectives.backends.nccl.symbols import NcclUniqueId
from axon_ps.errors import AxonError, Timeout, again
from axon_ps.types import Array, DType

_GO, _DROP = b"go", b"drop "
_LOOK_S = 0.02
_SLICE_S = 0.2

Move = Callable[[Array, DType], None]


class Messages:
    """One rank's messages.

    Args:
        context: the group; the ends meet in its store.
        connect: makes the function that moves bytes to (end 0) or from (end 1) one peer; the peer makes the other end
            at the same time, with the same unique id.
        generate_unique_id: makes a unique id.
    """

    def __init__(
        self,
        context: GroupContext,
        connect: Callable[[NcclUniqueId, int], Move],
        generate_unique_id: Callable[[], NcclUniqueId],
    ) -> None:
        self._context = context
        self._store = context.store
        self._connect = connect
        self._generate_unique_id = generate_unique_id
        self._lock = threading.Lock()
        self._order: defaultdict[tuple[str, int, int], threading.Lock] = defaultdict(threading.Lock)
        self._numbers: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        self._moves: dict[tuple[int, int], Move] = {}
        self._error: AxonError | None = None

    def abort(self, error: AxonError) -> None:
        """End the waits in the store; transfers are ended by the backend."""
        self._error = again(error)

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """Announce a message and transfer it when the receiver is ready."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            number = self._numbers["send", to, tag]
            self._numbers["send", to, tag] += 1
            key = self._key(self._context.rank, to, tag, number)
            self._store.put(key, f"{dtype.value} {data.size}".encode())
        reply = self._wait(f"{key}/reply", deadline)
        self._store.delete(f"{key}/reply")
        if reply.startswith(_DROP):
            calls = {
                self._context.ranks[to]: reply[len(_DROP) :].decode(),
                self._world_rank: _describe("send", data, dtype),
            }
            raise disagreement(calls, f"a message with tag {tag} in group {self._context.name!r}")
        if data.size:
            self._move((self._context.rank, to), deadline)(data, dtype)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """Receive the next message of a rank, or of any (-1); return its sender."""
        deadline = time.monotonic() + timeout_s
        sender, key, announced = self._next(source, tag, deadline)
        name, _, numel = announced.decode().partition(" ")
        if (name, int(numel)) != (dtype.value, data.size):
            expected = _describe("recv", data, dtype)
            self._store.put(f"{key}/reply", _DROP + expected.encode())
            calls = {self._context.ranks[sender]: f"send of {numel} {name}", self._world_rank: expected}
            raise disagreement(calls, f"a message with tag {tag} in group {self._context.name!r}")
        with self._order["move", sender, 0]:
            self._store.put(f"{key}/reply", _GO)
            if data.size:
                self._move((sender, self._context.rank), deadline)(data, dtype)
        return sender

    def _next(self, source: int, tag: int, deadline: float) -> tuple[int, str, bytes]:
        """Match the next message with a tag; return its sender, its key, its announcement."""
        sources = [source] if source >= 0 else [r for r in range(len(self._context.ranks)) if r != self._context.rank]
        while True:
            for candidate in sources:
                with self._order["recv", candidate, tag]:  # one receiver of a source at a time
                    number = self._numbers["recv", candidate, tag]
                    key = self._key(candidate, self._context.rank, tag, number)
                    limit = deadline if source >= 0 else time.monotonic() + _LOOK_S
                    try:
                        announced = self._wait(key, min(limit, deadline))
                    except Timeout:
                        if source >= 0 or time.monotonic() >= deadline:
                            raise
                        continue
                    self._numbers["recv", candidate, tag] += 1
                    self._store.delete(key)
                    return candidate, key, announced

    def _move(self, pair: tuple[int, int], deadline: float) -> Move:
        """Return the function that moves bytes in one direction between two ranks; both make it when first needed."""
        end = pair.index(self._context.rank)
        with self._order["connect", *pair]:
            if pair not in self._moves:
                key = f"nccl/{self._context.name}/pair/{pair[0]}/{pair[1]}"
                if end == 0:
                    unique_id = self._generate_unique_id()
                    self._store.put(key, unique_id.value)
                else:
                    value = self._wait(key, deadline)
                    self._store.delete(key)
                    unique_id = NcclUniqueId(value)
                self._moves[pair] = self._connect(unique_id, end)
            return self._moves[pair]

    def _wait(self, key: str, deadline: float) -> bytes:
        """Return the value of a key; end early on an abort."""
        while True:
            if self._error is not None:
                raise again(self._error)
            left = deadline - time.monotonic()
            try:
                return self._store.wait(key, max(0.001, min(_SLICE_S, left)))
            except Timeout:
                if left <= _SLICE_S:
                    raise

    @property
    def _world_rank(self) -> int:
        return self._context.ranks[self._context.rank]

    def _key(self, source: int, to: int, tag: int, number: int) -> str:
        return f"nccl/{self._context.name}/message/{source}/{to}/{tag}/{number}"


def _describe(what: str, data: Array, dtype: DType) -> str:
    return f"{what} of {data.size} {dtype.value}"
