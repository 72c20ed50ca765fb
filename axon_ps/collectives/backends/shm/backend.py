"""`SharedMemoryBackend`: the collectives of processes on one host.

Owns: the group's memory from its making to its end, and the way that a call goes. Refuses: the work of calls on the
ranks' arrays (`small`, `large`), and how ranks wait for each other (`control`), meet (`rendezvous`), find each other's
arrays (`exchange`), and send and receive (`mailbox`).

Every call begins with an exchange of headers, which is a barrier: all ranks check that they make the same call
(`agreement`). Up to INLINE_BYTES of a rank travel beside its header (`small`); all else is read where it is, or from a
copy in shared memory (`large`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from axon_ps.collectives.backends.base import Backend, GroupContext, Operation, Request
from axon_ps.collectives.backends.request import check_message
from axon_ps.collectives.backends.shm import small
from axon_ps.collectives.backends.shm.agreement import Agreement
from axon_ps.collectives.backends.shm.control import INLINE_BYTES
from axon_ps.collectives.backends.shm.exchange import PeerMemory
from axon_ps.collectives.backends.shm.large import LargeCalls
from axon_ps.collectives.backends.shm.mailbox import ShmMailbox
from axon_ps.collectives.backends.shm.rendezvous import rendezvous
from axon_ps.errors import AxonError, Closed, InvalidRequest
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType

SLOT_BYTES = 1 << 20
_MIN_WINDOW_BYTES = 128 << 10  # of a rank's partition in a slot: in smaller windows ranks wait more than they copy
_MIN_SLOT_BYTES = -(-max(dtype.itemsize for dtype in COLLECTIVE_DTYPES) // 64) * 64
"""The part of a slot that a rank needs at least: an element of any dtype, in full cache lines."""


class SharedMemoryBackend(Backend):
    """The collectives of processes on one host. See this module and `Backend`.

    Making it is collective: every rank of the group must make it.

    Args:
        context: the group. `context.store` is used while making it only, under `shm/NAME/...`, and left empty.
        slot_bytes: size of a slot, of which every rank has two once an array that is not shared is exchanged; 0 = as
            the number of ranks demands.

    Raises:
        Unreachable: a rank is on another host, or in another container, or the machine lacks what this needs.
        Busy: there is not enough memory; the message has the bytes needed and available.
        Timeout: a rank did not come; the message names it.
        MemberLost: a rank died meanwhile.
        Broken: a rank is not connected to another one.
        InvalidRequest: `slot_bytes` is too small for the number of ranks.
    """

    name = "shm"
    buffers_messages = True

    def __init__(self, context: GroupContext, *, slot_bytes: int = 0) -> None:
        super().__init__(context)
        n = len(context.ranks)
        if slot_bytes and slot_bytes < _MIN_SLOT_BYTES * n:
            raise InvalidRequest(f"slot_bytes is {slot_bytes}; {n} ranks need {_MIN_SLOT_BYTES} each")
        slot_bytes = slot_bytes or max(SLOT_BYTES, n * _MIN_WINDOW_BYTES)
        self._control, peers = rendezvous(context)
        self._peer_memory = PeerMemory(self._control, peers, slot_bytes // 64 * 64)
        self._mailbox = ShmMailbox(self._control, self._peer_memory)
        self._closed = False
        self._agreement = Agreement(context, self._control, self._peer_memory)
        self._large = LargeCalls(self._control, self._peer_memory, self._agreement)

    def empty_shared(self, shape: Sequence[int], dtype: DType) -> Array:
        """Make an array of zeros in memory that the other ranks map. It is not collective.

        A large call reads such arrays where they are, if every rank passes one. The array can be used in every group of
        this process, and lives as long as anything refers to it.

        Args:
            shape: shape of the array.
            dtype: DType; the array is of `dtype.numpy`.

        Raises:
            Busy: there is not enough memory; the message has the bytes needed and available.
        """
        return shared_arrays.empty(tuple(shape), dtype)

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        self._check_open()
        self._control.check()
        request.check(self.context.rank, len(self.context.ranks))
        deadline = time.monotonic() + timeout_s
        if request.call.operation is Operation.ALL_TO_ALL:
            self._all_to_all(request, deadline)
        elif small.is_small(request.call):
            small.run(self._agreement, request, deadline)
        else:
            self._large.run(request, deadline)

    def _all_to_all(self, request: Request, deadline: float) -> None:
        call, data, agreement = request.call, request.data, self._agreement
        # Only after the headers are exchanged do we know whether the call is small for all: offer the array both ways.
        pairs = (*request.input_counts, *request.output_counts)
        index = agreement.exchange_headers(call, data, deadline, pairs=pairs, large=True, source=data)
        counts = [agreement.pairs(index, r) for r in range(self.world_size)]
        agreement.check_pairs(call, counts)
        inputs = [sent for sent, _ in counts]
        if max(map(sum, inputs)) * call.dtype.itemsize <= INLINE_BYTES:
            small.all_to_all(agreement, request, index, inputs)
        else:
            self._large.all_to_all(request, index, inputs, deadline)

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend`."""
        self._check_open()
        check_message(data, dtype, to, tag, self.world_size, receiving=False)
        self._mailbox.send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend`."""
        self._check_open()
        check_message(data, dtype, source, tag, self.world_size, receiving=True)
        return self._mailbox.recv(data, dtype, source, tag, timeout_s)

    def abort(self, error: AxonError) -> None:
        """See `Backend`. The other ranks' pending calls end too."""
        if not self._closed:
            self._control.abort(error)

    def close(self) -> None:
        """See `Backend`. Ranks that still wait for this one get `Broken`."""
        if not self._closed:
            self._closed = True
            self._control.close()
            self._peer_memory.close()

    def statistics(self) -> dict[str, float]:
        """Return counters: calls; bytes inline, mapped in shared arrays, sent and received; waits and sleeps."""
        return {
            "calls": self._agreement.calls,
            "bytes_inline": self._agreement.bytes_inline,
            "bytes_mapped": self._peer_memory.bytes_mapped,
            "bytes_sent": self._mailbox.bytes_sent,
            "bytes_received": self._mailbox.bytes_received,
            "waits": self._control.waits,
            "sleeps": self._control.sleeps,
        }

    # --- every call

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"group {self.context.name!r} was closed")
