"""`Request`: a collective call and its arrays as one object; `RequestBackend`: a backend that performs requests.

Owns: which arrays a collective has and how long they are. A backend that handles all operations in a similar way
implements `_perform` instead of nine methods.

    shape legend: n = world_size, T = call.dtype.numpy, counts = call.counts
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation
from axon_ps.errors import InvalidRequest
from axon_ps.reduction import ops
from axon_ps.types import Array, DType

_EMPTY = (Operation.BARRIER, Operation.REFUSAL)
_ONE_COUNT = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
_ROOTED = (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_MAX_LISTED_COUNTS = 8
_ONLY_ON_ROOT = {Operation.GATHER: "output", Operation.SCATTER: "data"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank's call of a collective, with its arrays.

    Attributes:
        call: what all ranks agree on.
        data: what is read (and, without `output`, written): see the methods of `Backend`.
        output: where the result goes when it is not `data`.
        output_counts: ALL_TO_ALL: elements that come from each rank.
        input_counts: ALL_TO_ALL: elements that go to each rank.
    """

    call: Call
    data: Array | None = None
    output: Array | None = None
    output_counts: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()

    def lengths(self, rank: int) -> dict[str, int | None]:
        """How long each array must be on `rank`; None = it must not be there."""
        call, total = self.call, sum(self.call.counts)
        operation = call.operation
        if operation in _EMPTY:
            return {"data": None, "output": None}
        if operation is Operation.ALL_TO_ALL:
            return {"data": sum(self.input_counts), "output": sum(self.output_counts)}
        if operation in _ONE_COUNT:
            return {"data": call.counts[0], "output": None}
        mine = call.counts[rank]
        gathers = operation in (Operation.ALL_GATHER, Operation.GATHER)
        lengths: dict[str, int | None] = {"data": mine if gathers else total, "output": total if gathers else mine}
        if operation in _ONLY_ON_ROOT and rank != call.root:
            lengths[_ONLY_ON_ROOT[operation]] = None
        return lengths

    def check(self, context: GroupContext) -> None:
        """Check that call and arrays fit each other.

        Raises:
            InvalidRequest: they do not, or the operation has no meaning for the dtype.
        """
        call, n = self.call, len(context.ranks)
        needed = 0 if call.operation in (Operation.ALL_TO_ALL, *_EMPTY) else n
        needed = 1 if call.operation in _ONE_COUNT else needed
        if len(call.counts) != needed or any(c < 0 for c in call.counts):
            raise InvalidRequest(f"{call.operation.value} was given the counts {call.counts}; needed are {needed}")
        if call.operation is Operation.ALL_TO_ALL:
            for what, counts in (("output_counts", self.output_counts), ("input_counts", self.input_counts)):
                if len(counts) != n or any(c < 0 for c in counts):
                    raise InvalidRequest(f"{what} of {call} are {counts}; needed is one number from 0 per rank, of {n}")
        if call.operation in _ROOTED and not 0 <= call.root < n:
            raise InvalidRequest(f"the root of {call} is {call.root}; ranks go from 0 to {n - 1}")
        if call.operation in _REDUCING:
            if call.op is None:
                raise InvalidRequest(f"{call.operation.value} needs an op")
            ops.check(call.op, call.dtype)
        arrays = {"data": self.data, "output": self.output}
        for what, length in self.lengths(context.rank).items():
            _check_array(what, arrays[what], length, call)

    def mismatch(self, others: Sequence[Request], rank: int) -> bool:
        """ALL_TO_ALL: whether some rank does not send us, `rank`, as many elements as we expect."""
        return any(mine != other.input_counts[rank] for mine, other in zip(self.output_counts, others, strict=True))


def describe(call: Call, output_counts: Sequence[int] = (), input_counts: Sequence[int] = ()) -> str:
    """The call as text that differs for different calls: it adds to `str` the counts that are left out there."""
    if call.operation is not Operation.ALL_TO_ALL:
        if len(call.counts) <= _MAX_LISTED_COUNTS or len(set(call.counts)) == 1:
            return str(call)
        digest = zlib.crc32(repr(call.counts).encode())
        return f"{call}, {sum(call.counts)} in all, the counts' checksum being {digest:08x}"
    return f"{call}, {_listed(input_counts)} to and {_listed(output_counts)} from the ranks"


def check_message(data: Array, dtype: DType, peer: int, tag: int, context: GroupContext, *, any_source: bool) -> None:
    """Check the arguments of `send` or `recv`.

    Raises:
        InvalidRequest: they do not.
    """
    if not (0 <= peer < len(context.ranks) or (any_source and peer == -1)):
        raise InvalidRequest(f"there is no rank {peer} in a group of {len(context.ranks)}")
    if tag < 0:
        raise InvalidRequest(f"the tag is {tag}; it must not be negative")
    check_array("data", data, dtype, data.size)


def check_array(what: str, array: Array, dtype: DType, numel: int, *, writable: bool = False) -> None:
    """Check that an array is T[numel], 1-D and contiguous, T = dtype.numpy.

    Args:
        what: its name in messages.
        array: the array.
        dtype: of its elements.
        numel: how many it must have.
        writable: whether it must be one that can be written to.

    Raises:
        InvalidRequest: it is not.
    """
    if array.dtype != dtype.numpy or array.shape != (numel,) or not array.flags.c_contiguous:
        raise InvalidRequest(
            f"{what} has shape {list(array.shape)}, element type {array.dtype} and strides {array.strides}; needed is "
            f"a contiguous 1-D array of {numel} elements of {dtype.value}"
        )
    if writable and not array.flags.writeable:
        raise InvalidRequest(f"{what} is read-only; the result goes there, so pass an array that can be written")


def partition_starts(counts: Sequence[int]) -> list[int]:
    """Where partitions of these lengths begin when they lie one after the other."""
    return list(accumulate(counts, initial=0))[:-1]


def _check_array(what: str, array: Array | None, length: int | None, call: Call) -> None:
    if length is None:
        if array is not None:
            raise InvalidRequest(f"{call} takes no {what} on this rank")
        return
    if array is None:
        raise InvalidRequest(f"{call} needs {what} of {length} {call.dtype.value} on this rank; it got None")
    check_array(what, array, call.dtype, array.size)
    if array.size != length:
        raise InvalidRequest(f"{what} of {call} has {array.size} elements; needed are {length}")


def _listed(counts: Sequence[int]) -> str:
    listed = ", ".join(map(str, counts[:_MAX_LISTED_COUNTS])) + (", ..." if len(counts) > _MAX_LISTED_COUNTS else "")
    return f"({listed})"


def perform(backend: Backend, request: Request, timeout_s: float) -> None:
    """Make the call of a request on a backend."""
    call, data, output = request.call, request.data, request.output
    operation = call.operation
    if operation in _EMPTY:
        backend.barrier(call, timeout_s)
    elif operation is Operation.GATHER:
        assert data is not None
        backend.gather(call, output, data, timeout_s)
    elif operation is Operation.SCATTER:
        assert output is not None
        backend.scatter(call, output, data, timeout_s)
    elif operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST):
        assert data is not None
        in_place = {
            Operation.ALL_REDUCE: backend.all_reduce,
            Operation.REDUCE: backend.reduce,
            Operation.BROADCAST: backend.broadcast,
        }
        in_place[operation](call, data, timeout_s)
    else:
        assert data is not None
        assert output is not None
        if operation is Operation.ALL_TO_ALL:
            backend.all_to_all(call, output, data, request.output_counts, request.input_counts, timeout_s)
        else:
            apart = {Operation.ALL_GATHER: backend.all_gather, Operation.REDUCE_SCATTER: backend.reduce_scatter}
            apart[operation](call, output, data, timeout_s)


class RequestBackend(Backend):
    """A backend that performs every collective in `_perform`, which gets checked requests."""

    @abstractmethod
    def _perform(self, request: Request, timeout_s: float) -> None:
        """Perform a request. See the methods of `Backend` for results and errors."""

    def _checked(self, request: Request, timeout_s: float) -> None:
        if request.call.dtype not in self.dtypes:
            raise InvalidRequest(f"{self.name} does not do {request.call}; use a backend for host memory")
        request.check(self.context)
        self._perform(request, timeout_s)

    def all_reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.all_reduce`."""
        self._checked(Request(call=call, data=data), timeout_s)

    def reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.reduce`."""
        self._checked(Request(call=call, data=data), timeout_s)

    def broadcast(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.broadcast`."""
        self._checked(Request(call=call, data=data), timeout_s)

    def all_gather(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend.all_gather`."""
        self._checked(Request(call=call, output=output, data=data), timeout_s)

    def reduce_scatter(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend.reduce_scatter`."""
        self._checked(Request(call=call, output=output, data=data), timeout_s)

    def gather(self, call: Call, output: Array | None, data: Array, timeout_s: float) -> None:
        """See `Backend.gather`."""
        self._checked(Request(call=call, output=output, data=data), timeout_s)

    def scatter(self, call: Call, output: Array, data: Array | None, timeout_s: float) -> None:
        """See `Backend.scatter`."""
        self._checked(Request(call=call, output=output, data=data), timeout_s)

    def all_to_all(
        self,
        call: Call,
        output: Array,
        data: Array,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Backend.all_to_all`."""
        request = Request(
            call=call,
            output=output,
            data=data,
            output_counts=tuple(output_counts),
            input_counts=tuple(input_counts),
        )
        self._checked(request, timeout_s)

    def barrier(self, call: Call, timeout_s: float) -> None:
        """See `Backend.barrier`."""
        self._checked(Request(call=call), timeout_s)
