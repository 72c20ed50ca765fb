"""The beginning of every call on one host: all ranks say what they are asked for, and see that it is the same.

Owns: the headers, the disagreement, and the data of small calls, which lies beside the headers. Refuses: to know what
the ranks do then.

There are two headers of every rank, for even and for odd calls. A rank writes the next one into the other place; it
can only come to write this one again when all have come to the call between, and so have left this one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Call, GroupContext, Operation, disagreement
from axon_ps.collectives.backends.shm.control import COUNTS, INLINE_BYTES, Control
from axon_ps.collectives.backends.shm.exchange import Reach
from axon_ps.types import Array, DType, ReduceOp

_HEADER = struct.Struct("<QIiBBB")  # sequence, number of counts, root, operation, dtype, op
_OPERATIONS = {operation: i for i, operation in enumerate(Operation)}
_DTYPES = {dtype: i for i, dtype in enumerate(DType)}
_OPS: dict[ReduceOp | None, int] = {None: 255, **{op: i for i, op in enumerate(ReduceOp)}}


class Agreement:
    """Where the ranks of a group begin their calls. One thread at a time.

    Attributes:
        calls: how many there were.
        bytes_inline: bytes that lay beside our headers.

    Args:
        context: the group.
        control: its control segment.
        reach: says how an array can be reached.
    """

    def __init__(self, context: GroupContext, control: Control, reach: Reach) -> None:
        self.context = context
        self.rank = context.rank
        self.calls = 0
        self.bytes_inline = 0
        self._control = control
        self._reach = reach
        n, layout, memory = len(context.ranks), control.layout, control.bytes
        self._headers = [[layout.header(r, parity) for r in range(n)] for parity in (0, 1)]
        self._inline = [
            [memory[layout.inline(r, parity) : layout.inline(r, parity) + INLINE_BYTES] for r in range(n)]
            for parity in (0, 1)
        ]

    def meet(
        self,
        call: Call,
        inline: Array | None,
        deadline: float,
        *,
        pairs: tuple[int, ...] = (),
        large: bool = False,
        shown: Array | None = None,
        result: Array | None = None,
    ) -> int:
        """Say what we are asked for, and see that all ranks are asked for the same.

        Args:
            call: what for.
            inline: what goes beside the header, unless it is too large.
            deadline: of the call.
            pairs: counts that need not be equal.
            large: whether arrays are reached where they are.
            shown: an array that others reach where it is.
            result: where our part of the result will lie, if not in `shown`.

        Returns:
            The parity of the headers, which hold until the next but one call.
        """
        control, parity = self._control, self.calls & 1
        self.calls += 1
        memory, headers = control.memory, self._headers[parity]
        mine = headers[self.rank]
        counts = call.counts
        numbers = struct.pack(f"<{len(counts) or len(pairs)}Q", *(counts or pairs))
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
            self._reach.describe(shown, result, mine)
        if inline is not None and inline.nbytes <= INLINE_BYTES:
            self.bytes_inline += inline.nbytes
            if inline.size:
                np.copyto(self._inline[parity][self.rank][: inline.nbytes].view(inline.dtype), inline)
        control.gate(deadline)
        agreed = len(numbers) if counts else 0
        for header in headers:
            if header != mine and (
                memory[header : header + len(head)] != head
                or (agreed and memory[header + COUNTS : header + COUNTS + agreed] != numbers)
            ):
                self._disagree(call, str(call), parity, deadline)
        return parity

    def _disagree(self, call: Call, text: str, parity: int, deadline: float) -> None:
        """Tell the others in words what we were asked for, and raise what all of them raise."""
        control, layout = self._control, self._control.layout
        headers = self._headers[parity]
        sequences = [control.words(header, "<Q")[0] for header in headers]
        if len(set(sequences)) > 1:
            text += f" as its call {call.sequence}"
        control.put_text(headers[self.rank] + layout.text, text)
        control.gate(deadline)
        texts = {world: control.text(h + layout.text) for world, h in zip(self.context.ranks, headers, strict=True)}
        raise disagreement(texts, f"call {min(sequences)} of group {self.context.name!r}")

    def pairs(self, parity: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The input and the output counts of a rank in an all-to-all."""
        n = len(self.context.ranks)
        numbers = self._control.words(self._headers[parity][rank] + COUNTS, f"<{2 * n}Q")
        return numbers[:n], numbers[n:]

    def see_pairs(self, call: Call, counts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], deadline: float) -> None:
        ranks = self.context.ranks
        for i, (inputs, _) in enumerate(counts):
            for j, (_, outputs) in enumerate(counts):
                if inputs[j] != outputs[i]:
                    says = {
                        ranks[i]: f"{call} that sends {inputs[j]} to rank {ranks[j]}",
                        ranks[j]: f"{call} that expects {outputs[i]} from rank {ranks[i]}",
                    }
                    if i == j:
                        says = {ranks[i]: f"{call} that sends {inputs[i]} to itself and expects {outputs[i]}"}
                    raise disagreement(says, f"call {call.sequence} of group {self.context.name!r}")

    def input(self, parity: int, rank: int, dtype: DType, begin: int, count: int) -> Array:
        """T[count]: a piece of what a rank put beside its header."""
        begin *= dtype.itemsize
        return self._inline[parity][rank][begin : begin + count * dtype.itemsize].view(dtype.numpy)

    def inputs(self, parity: int, dtype: DType, count: int, begin: int = 0) -> list[Array]:
        """That of all ranks."""
        kind, begin, end = dtype.numpy, begin * dtype.itemsize, (begin + count) * dtype.itemsize
        return [inline[begin:end].view(kind) for inline in self._inline[parity]]
