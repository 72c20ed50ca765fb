"""`Request`: a collective call and its arrays, as a backend performs it.

Owns: the arrays of a collective, their lengths, and the array that it changes.

    shape legend: n = world_size, T = call.dtype.numpy, counts = call.counts; every array is 1-D and contiguous

    operation        data is read                      the result goes to
    ---------        ------------                      ------------------
    ALL_REDUCE       T[counts[0]]                      data: the reduction of all ranks' data
    REDUCE           T[counts[0]]                      data, on the root only
    BROADCAST        T[counts[0]], on the root only    data, everywhere else
    ALL_GATHER       T[counts[rank]]                   output: T[sum(counts)], all ranks' data in rank order
    REDUCE_SCATTER   T[sum(counts)]                    output: T[counts[rank]], our partition of the reduction
    GATHER           T[counts[rank]]                   output: T[sum(counts)], on the root; None elsewhere
    SCATTER          T[sum(counts)], on the root;      output: T[counts[rank]], our partition of the root's data
                     None elsewhere
    ALL_TO_ALL       T[sum(input_counts)]              output: T[sum(output_counts)], whose partition i is the partition
                                                       of rank i's data that is for us
    BARRIER,         None                              nowhere: it ends when every rank has come, to a barrier or with
    REFUSAL                                            a refusal

ALL_GATHER: `data` may be its own partition of `output` (same memory), and must not overlap it otherwise; the same holds
of REDUCE_SCATTER with `output` and `data` exchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from axon_ps.errors import InvalidRequest
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array, DType

_DTYPES = tuple(DType)
_EMPTY = (Operation.BARRIER, Operation.REFUSAL)
_NO_COUNTS = (Operation.ALL_TO_ALL, *_EMPTY)
_ONE_COUNT = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
_ROOTED = (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_MAX_LISTED_COUNTS = 8


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One rank's call of a collective, with its arrays; see this module. It is never changed once it is made.

    Attributes:
        call: the part on which all ranks agree.
        data: the array that is read and, without `output`, written.
        output: the array for the result when it is not `data`.
        output_counts: ALL_TO_ALL: elements that come from each rank.
        input_counts: ALL_TO_ALL: elements that go to each rank.
    """

    call: Call
    data: Array | None = None
    output: Array | None = None
    output_counts: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()

    def lengths(self, rank: int) -> tuple[int | None, int | None]:
        """Return the lengths of `data` and `output` on `rank`; None = it must not be there."""
        call = self.call
        operation, counts = call.operation, call.counts
        if operation in _ONE_COUNT:
            return counts[0], None
        if operation in _EMPTY:
            return None, None
        if operation is Operation.ALL_TO_ALL:
            return sum(self.input_counts), sum(self.output_counts)
        mine, total = counts[rank], sum(counts)
        if operation is Operation.GATHER:
            return mine, total if rank == call.root else None
        if operation is Operation.SCATTER:
            return total if rank == call.root else None, mine
        return (mine, total) if operation is Operation.ALL_GATHER else (total, mine)

    def target(self, rank: int) -> Array | None:
        """Return the array that the call changes on `rank`; None = it changes none."""
        operation, root = self.call.operation, self.call.root
        if operation not in _ONE_COUNT:
            return self.output
        if operation is Operation.ALL_REDUCE:
            return self.data
        return self.data if (rank == root) == (operation is Operation.REDUCE) else None

    def check(self, rank: int, world_size: int, dtypes: Collection[DType] = _DTYPES) -> None:
        """Check that call and arrays fit each other.

        Args:
            rank: our position in the group.
            world_size: number of ranks.
            dtypes: the dtypes that the backend supports.

        Raises:
            InvalidRequest: they do not, or the operation has no meaning for the dtype.
        """
        call, n = self.call, world_size
        operation, counts, dtype = call.operation, call.counts, call.dtype
        if dtype not in dtypes:
            raise InvalidRequest(f"this backend does not do {call}; use a backend for host memory")
        needed = 1 if operation in _ONE_COUNT else 0 if operation in _NO_COUNTS else n
        if len(counts) != needed or (counts and min(counts) < 0):
            raise InvalidRequest(f"{operation.value} was given the counts {counts}; needed are {needed}")
        if operation is Operation.ALL_TO_ALL:
            for what, given in (("output_counts", self.output_counts), ("input_counts", self.input_counts)):
                if len(given) != n or min(given) < 0:
                    raise InvalidRequest(f"{what} of {call} are {given}; needed is one number from 0 per rank, of {n}")
        if operation in _ROOTED and not 0 <= call.root < n:
            raise InvalidRequest(f"the root of {call} is {call.root}; ranks go from 0 to {n - 1}")
        if operation in _REDUCING:
            if call.op is None:
                raise InvalidRequest(f"{operation.value} needs an op")
            ops.check(call.op, dtype)
        data_numel, output_numel = self.lengths(rank)
        self._check_array(
            "data", self.data, data_numel, written=operation in _ONE_COUNT and self.target(rank) is not None
        )
        self._check_array("output", self.output, output_numel, written=True)

    def _check_array(self, what: str, array: Array | None, numel: int | None, *, written: bool) -> None:
        call = self.call
        if array is not None and numel is not None:
            _check_array(what, array, call.dtype, numel, written)
        elif array is not None:
            raise InvalidRequest(f"{call} takes no {what} on this rank")
        elif numel is not None:
            raise InvalidRequest(f"{call} needs {what} of {numel} {call.dtype.value} on this rank; it got None")

    def mismatch(self, others: Sequence[Request], rank: int) -> bool:
        """Return True if, in an ALL_TO_ALL, some rank does not send us, `rank`, as many elements as we expect."""
        return any(mine != other.input_counts[rank] for mine, other in zip(self.output_counts, others, strict=True))


def describe(call: Call, output_counts: Sequence[int] = (), input_counts: Sequence[int] = ()) -> str:
    """Return `str(call)`, and a checksum of counts that it leaves out, or the first counts of an all-to-all."""
    if call.operation is not Operation.ALL_TO_ALL:
        if len(call.counts) <= _MAX_LISTED_COUNTS or len(set(call.counts)) == 1:
            return str(call)
        digest = zlib.crc32(repr(call.counts).encode())
        return f"{call}, {sum(call.counts)} in all, the counts' checksum being {digest:08x}"
    return f"{call}, {_listed(input_counts)} to and {_listed(output_counts)} from the ranks"


def required(array: Array | None) -> Array:
    """Return an array of a request, which `Request.check` has found to be there."""
    assert array is not None, "Request.check has checked this"
    return array


def check_message(data: Array, dtype: DType, peer: int, tag: int, world_size: int, *, receiving: bool) -> None:
    """Check the arguments of `send`, or of `recv`, which writes to `data` and may name no peer (-1).

    Raises:
        InvalidRequest: they are not valid.
    """
    if not (0 <= peer < world_size or (receiving and peer == -1)):
        raise InvalidRequest(f"there is no rank {peer} in a group of {world_size}")
    if tag < 0:
        raise InvalidRequest(f"the tag is {tag}; it must not be negative")
    _check_array("data", data, dtype, data.size, receiving)


def partition_starts(counts: Sequence[int]) -> list[int]:
    """Return the offsets of partitions of these lengths that lie one after the other."""
    return list(accumulate(counts, initial=0))[:-1]


def _check_array(what: str, array: Array, dtype: DType, numel: int, written: bool) -> None:
    if array.dtype != dtype.numpy or array.ndim != 1 or not array.flags.c_contiguous:
        raise InvalidRequest(
            f"{what} has shape {list(array.shape)}, element type {array.dtype} and strides {array.strides}; needed is "
            f"a contiguous 1-D array of {dtype.value}"
        )
    if array.size != numel:
        raise InvalidRequest(f"{what} has {array.size} elements; needed are {numel}")
    if written and not getattr(array.flags, "writeable", True):  # cupy's arrays always are, without the flag
        raise InvalidRequest(f"{what} is read-only, and the result goes there; pass an array that can be written")


def _listed(counts: Sequence[int]) -> str:
    listed = ", ".join(map(str, counts[:_MAX_LISTED_COUNTS])) + (", ..." if len(counts) > _MAX_LISTED_COUNTS else "")
    return f"({listed})"
