"""The collective that a rank asks for, as a value that can be compared and printed.

Owns: `Operation`, `Call` and the error for ranks that disagree. Both ends need them: the backends make the calls, and
the shard servers check that all ranks make the same call.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_ps.errors import Disagreement
from axon_ps.types import DType, ReduceOp

REASON_CHARS = 200
"""The most characters of a reason that are sent."""


class Operation(enum.Enum):
    """The kind of collective; REFUSAL: one rank cannot make it. See `collectives.backends.base`, Note: [Agreement]."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    REFUSAL = "refusal"


@dataclass(kw_only=True, slots=True, unsafe_hash=True)
class Call:
    """One collective as one rank describes it; equal on every rank.

    See `collectives.backends.base`, Note: [Agreement]. It is never changed once it is made. It is not frozen because
    making a frozen one takes three times as long (1.4 us; a small call takes 10).

    Attributes:
        sequence: number of collectives that this group did before.
        operation: the kind of collective.
        dtype: element type.
        counts: ALL_REDUCE, REDUCE, BROADCAST: (elements,). ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER: elements of
            each rank's partition, by rank. ALL_TO_ALL and BARRIER: empty (in an all-to-all every rank has its own
            counts; those of sender and receiver are compared pair by pair).
        op: ALL_REDUCE, REDUCE, REDUCE_SCATTER: how to combine.
        root: REDUCE, BROADCAST, GATHER, SCATTER: the root's position in the group; else -1.
        reason: REFUSAL: the call that this rank refused, and why; at most `REASON_CHARS` characters.
            It is not compared: ranks that all refuse agree.
    """

    sequence: int
    operation: Operation
    dtype: DType = DType.U8
    counts: tuple[int, ...] = ()
    op: ReduceOp | None = None
    root: int = -1
    reason: str = field(default="", compare=False)

    def refused(self, error: BaseException) -> Call:
        """Return the call to make if this rank cannot make this one. It equals only refusals, so all get the reason."""
        return Call.refusal(self.sequence, self.operation.value, str(error))

    @staticmethod
    def refusal(sequence: int, what: str, why: str) -> Call:
        """Return a refusal of a call that could not even be described."""
        return Call(sequence=sequence, operation=Operation.REFUSAL, reason=f"refused {what}: {why}"[:REASON_CHARS])

    def __str__(self) -> str:
        """Return text for error messages: "all_reduce(sum) of 12 f32", "broadcast of 3 i64 from rank 1"."""
        text = self.operation.value + (f"({self.op.value})" if self.op is not None else "")
        if self.operation is Operation.BARRIER:
            return text
        if self.operation is Operation.REFUSAL:
            return self.reason
        if self.operation is Operation.ALL_TO_ALL:
            return f"{text} of {self.dtype.value}"
        counts = set(self.counts)
        if len(self.counts) == 1:
            numel = str(self.counts[0])
        elif len(counts) == 1:
            numel = f"{len(self.counts)} x {self.counts[0]}"
        else:
            listed = ", ".join(map(str, self.counts[:8])) + (", ..." if len(self.counts) > 8 else "")
            numel = f"({listed})"
        text += f" of {numel} {self.dtype.value}"
        if self.root >= 0:
            text += f" {'to' if self.operation in (Operation.REDUCE, Operation.GATHER) else 'from'} rank {self.root}"
        return text


def disagreement(calls: Mapping[int, str], what: str) -> Disagreement:
    """Return the error for ranks that asked for different things.

    Args:
        calls: the call of each rank as text (`str(call)`), by world rank.
        what: the call and its group: "call 17 of group 'default'".
    """
    ranks_by_call: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls):
        ranks_by_call[calls[rank]].append(rank)
    asked = "; ".join(f"rank {', '.join(map(str, ranks))}: {call}" for call, ranks in ranks_by_call.items())
    return Disagreement(f"the ranks disagree on {what}: {asked}; every rank must make the same calls in the same order")
