"""The begin of every call on one host: the ranks exchange headers, and check that all make the same call.

Owns: the headers, the disagreement, and the data of small calls, which lies beside the headers. Refuses: to perform
the call.

The headers are double-buffered: every rank has one for even and one for odd calls (the buffer index). A rank reuses a
header only when all ranks have come to the call in between, and so have finished reading it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Call, GroupContext, Operation, disagreement
from axon_ps.collectives.backends.shm.control import COUNTS, INLINE_BYTES, Control
from axon_ps.collectives.backends.shm.exchange import PeerMemory
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType, ReduceOp

_HEADER = struct.Struct("<QIiBBB")  # sequence, number of counts, root, operation, dtype, op
_COUNT = struct.Struct("<Q")
_OPERATIONS = {operation: i for i, operation in enumerate(Operation)}
_DTYPES = {dtype: i for i, dtype in enumerate(COLLECTIVE_DTYPES)}
_OPS: dict[ReduceOp | None, int] = {None: 255, **{op: i for i, op in enumerate(ReduceOp)}}


class Agreement:
    """Exchanges and compares the headers of a group's calls. One thread at a time may use it.

    Attributes:
        calls: number of calls so far.
        bytes_inline: bytes that this rank sent beside its headers.

    Args:
        context: the group.
        control: its control segment.
        peer_memory: makes the descriptors by which peers find an array.
    """

    def __init__(self, context: GroupContext, control: Control, peer_memory: PeerMemory) -> None:
        self.context = context
        self.rank = context.rank
        self.calls = 0
        self.bytes_inline = 0
        self._control = control
        self._peer_memory = peer_memory
        n, layout, memory = len(context.ranks), control.layout, control.bytes
        self._headers = [[layout.header(r, buffer_index) for r in range(n)] for buffer_index in (0, 1)]
        self._inline = [
            [memory[layout.inline(r, buffer_index) : layout.inline(r, buffer_index) + INLINE_BYTES] for r in range(n)]
            for buffer_index in (0, 1)
        ]

    def exchange_headers(
        self,
        call: Call,
        inline: Array | None,
        deadline: float,
        *,
        pairs: tuple[int, ...] = (),
        large: bool = False,
        source: Array | None = None,
    ) -> int:
        """Publish our header, wait for all others, and check that all ranks make the same call.

        Args:
            call: ours.
            inline: data to put beside the header, unless it is too large.
            deadline: deadline of the call.
            pairs: counts that need not be equal on all ranks.
            large: True = the header describes an array that the peers read.
            source: that array; None = they read nothing from this rank.

        Returns:
            The buffer index of the headers, which are valid until the next call but one.
        """
        control, buffer_index = self._control, self.calls & 1
        self.calls += 1
        memory, headers = control.memory, self._headers[buffer_index]
        mine = headers[self.rank]
        counts = call.counts
        numbers = (
            _COUNT.pack(*counts) if len(counts) == 1 else struct.pack(f"<{len(counts or pairs)}Q", *counts, *pairs)
        )
        head = _HEADER.pack(
            call.sequence,
            len(counts),
            call.root,
            _OPERATIONS[call.operation],
            _DTYPES[call.dtype],
            _OPS[call.op],
        )
        memory[mine : mine + len(head)] = head
        memory[mine + COUNTS : mine + COUNTS + len(numbers)] = numbers
        if large:
            self._peer_memory.describe(source, mine)
        if inline is not None and inline.nbytes <= INLINE_BYTES:
            self.bytes_inline += inline.nbytes
            if inline.size:
                np.copyto(self._inline[buffer_index][self.rank][: inline.nbytes].view(inline.dtype), inline)
        control.barrier(deadline)
        agreed = len(numbers) if counts else 0
        for header in headers:
            if header != mine and (
                memory[header : header + len(head)] != head
                or (agreed and memory[header + COUNTS : header + COUNTS + agreed] != numbers)
            ):
                self._disagree(call, buffer_index, deadline)
        return buffer_index

    def _disagree(self, call: Call, buffer_index: int, deadline: float) -> None:
        """Publish our call as text, and raise the error with all ranks' texts, which every rank raises."""
        control, layout = self._control, self._control.layout
        headers = self._headers[buffer_index]
        sequences = [control.numbers(header, "<Q")[0] for header in headers]
        text = str(call)
        if len(set(sequences)) > 1:
            text += f" as its call {call.sequence}"
        control.put_text(headers[self.rank] + layout.text, text)
        control.barrier(deadline)
        texts = {world: control.text(h + layout.text) for world, h in zip(self.context.ranks, headers, strict=True)}
        raise disagreement(texts, f"call {min(sequences)} of group {self.context.name!r}")

    def pairs(self, buffer_index: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a rank's input and output counts in an all-to-all."""
        n = len(self.context.ranks)
        numbers = self._control.numbers(self._headers[buffer_index][rank] + COUNTS, f"<{2 * n}Q")
        return numbers[:n], numbers[n:]

    def check_pairs(self, call: Call, counts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        """Check that in an all-to-all every rank sends as many elements as the receiver expects.

        Raises:
            Disagreement: a rank does not.
        """
        ranks = self.context.ranks
        for i, (inputs, _) in enumerate(counts):
            for j, (_, outputs) in enumerate(counts):
                if inputs[j] != outputs[i]:
                    descriptions = {
                        ranks[i]: f"{call} that sends {inputs[j]} to rank {ranks[j]}",
                        ranks[j]: f"{call} that expects {outputs[i]} from rank {ranks[i]}",
                    }
                    if i == j:
                        descriptions = {ranks[i]: f"{call} that sends {inputs[i]} to itself and expects {outputs[i]}"}
                    raise disagreement(descriptions, f"call {call.sequence} of group {self.context.name!r}")

    def input(self, buffer_index: int, rank: int, dtype: DType, begin: int, count: int) -> Array:
        """Return T[count]: a range of a rank's inline data."""
        begin *= dtype.itemsize
        return self._inline[buffer_index][rank][begin : begin + count * dtype.itemsize].view(dtype.numpy)

    def inputs(self, buffer_index: int, dtype: DType, count: int, begin: int = 0) -> list[Array]:
        """Return T[count] of every rank: the same range of its inline data."""
        kind, begin, end = dtype.numpy, begin * dtype.itemsize, (begin + count) * dtype.itemsize
        return [inline[begin:end].view(kind) for inline in self._inline[buffer_index]]
