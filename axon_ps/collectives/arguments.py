"""The arguments of collectives: checked on this rank alone, and made into the flat arrays of a call.

Owns: the shapes of arguments and results. A row is an item along the first dimension; a scalar counts as one row. Every
check raises `InvalidRequest`, which `GroupCalls` reports to the other ranks. It is pure.

The functions with the names of collectives take the arguments of the methods of `ProcessGroup`, and return the call
that is to be made.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.group_members import GroupMembers
from axon_ps.errors import InvalidRequest
from axon_ps.reduction import ops as reduction
from axon_ps.types import DType, ReduceOp, parse_member

Function = TypeVar("Function", bound=Callable[..., Any])
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]
Seconds: TypeAlias = float | None
Counts: TypeAlias = Sequence[int] | None
Shape: TypeAlias = int | Sequence[int]


class NamedOp(Protocol):
    """The type of `torch.distributed.ReduceOp.SUM`."""

    @property
    def name(self) -> str:
        """Its name."""


Op: TypeAlias = ReduceOp | str | NamedOp


@dataclass(kw_only=True, slots=True, eq=False)
class PreparedCall:
    """A collective that this rank can make: a `Request` without its number. It is never changed once it is made.

    Attributes:
        operation: the kind of collective.
        data: the array that is read and, without `output`, written.
        output: the array for the result when it is not `data`.
        result: the user's array that the call returns.
        counts, op, root: see `Call`.
        output_counts, input_counts: see `Request`.
        copied: an array that is copied to `data` first.
    """

    operation: Operation
    data: Flat | None = None
    output: Flat | None = None
    result: Any = None
    counts: tuple[int, ...] = ()
    op: ReduceOp | None = None
    root: int = -1
    output_counts: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()
    copied: Flat | None = None

    def numbered(self, sequence: int) -> Call:
        """Return the description of the call, as the group's call number `sequence`."""
        flat = self.data or self.output
        dtype = DType.U8 if flat is None else flat.dtype
        return Call(
            sequence=sequence, operation=self.operation, dtype=dtype, counts=self.counts, op=self.op, root=self.root
        )

    def request(self, call: Call) -> Request:
        """Return the call with its arrays, as a backend takes it."""
        return Request(
            call=call,
            data=None if self.data is None else self.data.array,
            output=None if self.output is None else self.output.array,
            output_counts=self.output_counts,
            input_counts=self.input_counts,
        )


# ---------------------------------------------------------------------- the collectives


def all_reduce(data: Any, op: Op, out: Any = None) -> PreparedCall:
    """Prepare `ProcessGroup.all_reduce`."""
    result, flat, source = result_like(data, out)
    op = _operation(op, flat.dtype)
    return PreparedCall(
        operation=Operation.ALL_REDUCE, data=flat, result=result, counts=(flat.array.size,), op=op, copied=source
    )


def reduce(members: GroupMembers, data: Any, root: int, op: Op) -> PreparedCall:
    """Prepare `ProcessGroup.reduce`."""
    is_root = members.checked_rank(root, "dst") == members.rank
    flat = arrays.flatten(data, writable=is_root)
    op = _operation(op, flat.dtype)
    return PreparedCall(operation=Operation.REDUCE, data=flat, result=data, counts=(flat.array.size,), op=op, root=root)


def broadcast(members: GroupMembers, data: Any, root: int) -> PreparedCall:
    """Prepare `ProcessGroup.broadcast`."""
    is_root = members.checked_rank(root, "src") == members.rank
    flat = arrays.flatten(data, writable=not is_root)
    return PreparedCall(operation=Operation.BROADCAST, data=flat, result=data, counts=(flat.array.size,), root=root)


def all_gather(members: GroupMembers, data: Any, out: Any, counts: Sequence[int] | None) -> PreparedCall:
    """Prepare `ProcessGroup.all_gather`."""
    flat = arrays.flatten(data, writable=False)
    rows = _rows_by_rank(counts, _rows(flat), members)
    _match_rows("data", flat, rows[members.rank])
    result, output = _output(out, data, flat, sum(rows))
    return PreparedCall(
        operation=Operation.ALL_GATHER, data=flat, output=output, result=result, counts=_numels(rows, flat)
    )


def reduce_scatter(members: GroupMembers, data: Any, op: Op, out: Any, counts: Sequence[int] | None) -> PreparedCall:
    """Prepare `ProcessGroup.reduce_scatter`."""
    flat = arrays.flatten(data, writable=False)
    op = _operation(op, flat.dtype)
    rows = _split(_rows(flat), members.world_size) if counts is None else _rows_by_rank(counts, 0, members)
    _match_rows("data", flat, sum(rows))
    result, output = _output(out, data, flat, rows[members.rank])
    return PreparedCall(
        operation=Operation.REDUCE_SCATTER, data=flat, output=output, result=result, counts=_numels(rows, flat), op=op
    )


def gather(members: GroupMembers, data: Any, root: int, out: Any, counts: Sequence[int] | None) -> PreparedCall:
    """Prepare `ProcessGroup.gather`."""
    is_root = members.checked_rank(root, "dst") == members.rank
    flat = arrays.flatten(data, writable=False)
    rows = _rows_by_rank(counts, _rows(flat), members)
    _match_rows("data", flat, rows[members.rank])
    result, output = _output(out, data, flat, sum(rows)) if is_root else (None, None)
    return PreparedCall(
        operation=Operation.GATHER, data=flat, output=output, result=result, counts=_numels(rows, flat), root=root
    )


def scatter(members: GroupMembers, data: Any, root: int, out: Any, counts: Sequence[int] | None) -> PreparedCall:
    """Prepare `ProcessGroup.scatter`."""
    is_root = members.checked_rank(root, "src") == members.rank
    if data is None and (is_root or out is None):
        raise InvalidRequest("scatter needs data on rank src, and elsewhere data or out=, whose shape comes")
    source = arrays.flatten(data, writable=False) if is_root or out is None else None
    if out is not None:
        mine = arrays.flatten(out, what="out")
        rows = _rows_by_rank(counts, _rows(mine), members)
        _match_rows("out", mine, rows[members.rank])
    else:
        assert source is not None
        each = _divided(_rows(source), members.world_size, "counts=") if counts is None else 0
        rows = _rows_by_rank(counts, each, members)
        out, mine = _output(None, data, source, rows[members.rank])
    if is_root:
        assert source is not None
        _match_rows("data", source, sum(rows))
    sent = source if is_root else None
    return PreparedCall(
        operation=Operation.SCATTER, data=sent, output=mine, result=out, counts=_numels(rows, mine), root=root
    )


def all_to_all(
    members: GroupMembers,
    data: Any,
    out: Any,
    output_counts: Sequence[int] | None,
    input_counts: Sequence[int] | None,
) -> PreparedCall:
    """Prepare `ProcessGroup.all_to_all`."""
    flat = arrays.flatten(data, writable=False)
    each = _divided(_rows(flat), members.world_size, "input_counts=") if input_counts is None else 0
    sent = _rows_by_rank(input_counts, each, members)
    _match_rows("data", flat, sum(sent))
    received = sent if output_counts is None else _rows_by_rank(output_counts, 0, members)
    result, output = _output(out, data, flat, sum(received))
    return PreparedCall(
        operation=Operation.ALL_TO_ALL,
        data=flat,
        output=output,
        result=result,
        output_counts=_numels(received, flat),
        input_counts=_numels(sent, flat),
    )


def barrier() -> PreparedCall:
    """Prepare `ProcessGroup.barrier`."""
    return PreparedCall(operation=Operation.BARRIER)


# ---------------------------------------------------------------------- operations and ranks


def _operation(given: Op, dtype: DType) -> ReduceOp:
    """Return a reduction that is defined for a dtype."""
    op = parse_member(given, ReduceOp, "op")
    reduction.check(op, dtype)
    return op


def rank_names(name: str, *, old: str | None = None) -> Callable[[Function], Function]:
    """Let a function take its argument `name` ("dst" or "src") by torch's other name, "group_dst", and by an old one.

    The old name works for one release, with a `DeprecationWarning`. The function raises `InvalidRequest` where the
    argument is given twice, or is needed and not given.
    """
    others = (f"group_{name}",) if old is None else (f"group_{name}", old)

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        position = list(parameters).index(name)
        needed = parameters[name].default is inspect.Parameter.empty

        @functools.wraps(function)
        def renamed(*args: Any, **given: Any) -> Any:
            for other in others:
                if other in given:
                    if name in given or len(args) > position:
                        raise InvalidRequest(f"{function.__name__} was given {name} and {other}, which are one rank")
                    if other == old:
                        text = f"{old}= of {function.__name__} is called {name}= now"
                        warnings.warn(text, DeprecationWarning, stacklevel=2)
                    given[name] = given.pop(other)
            if needed and name not in given and len(args) <= position:
                raise InvalidRequest(f"{function.__name__} was not given {name}=, a position in the group")
            return function(*args, **given)

        return cast("Function", renamed)

    return decorate


# ---------------------------------------------------------------------- shapes


def result_like(data: Any, out: Any) -> tuple[Any, Flat, Flat | None]:
    """Return the array for a result like `data`, its flat form, and the array to copy there first, if any."""
    if out is None or out is data:
        return data, arrays.flatten(data), None
    source, flat = arrays.flatten(data, writable=False), arrays.flatten(out, what="out")
    _match(flat, source.shape, source.dtype, source.device)
    return out, flat, source


def _output(given: Any, data: Any, flat: Flat, num_rows: int) -> tuple[Any, Flat]:
    """Return an array of `num_rows` rows like those of `data` (`given`, or a new one), and its flat form."""
    shape = (num_rows, *flat.shape[1:])
    if given is None:
        given = arrays.empty_like(data, shape)
        return given, arrays.flatten(given)
    result = arrays.flatten(given, what="out")
    if shape == (1,) and result.shape == ():
        shape = ()
    _match(result, shape, flat.dtype, flat.device)
    return given, result


def _rows(flat: Flat) -> int:
    """Return the number of rows of an array."""
    return flat.shape[0] if flat.shape else 1


def _rows_by_rank(given: Sequence[int] | None, each: int, members: GroupMembers) -> tuple[int, ...]:
    """Return rows by rank: the given ones, or `each` for every rank."""
    if given is None:
        return (each,) * members.world_size
    numbers = tuple(int(c) for c in given)
    if len(numbers) != members.world_size or any(r < 0 for r in numbers):
        raise InvalidRequest(
            f"the counts are {list(given)}; needed is one number from 0 for each of {members.world_size} ranks"
        )
    return numbers


def _numels(rows: Sequence[int], like: Flat) -> tuple[int, ...]:
    """Return the elements in each of these numbers of rows."""
    width = prod(like.shape[1:])
    return tuple(r * width for r in rows)


def _split(total: int, world_size: int) -> tuple[int, ...]:
    """Return rows by rank, as even as possible: the first have one more."""
    return tuple(total // world_size + (r < total % world_size) for r in range(world_size))


def _divided(total: int, world_size: int, otherwise: str) -> int:
    """Return each rank's rows when rows are divided equally; the error names the argument to give otherwise."""
    if total % world_size:
        raise InvalidRequest(f"{total} rows do not divide among {world_size} ranks; give {otherwise}")
    return total // world_size


def _match_rows(what: str, flat: Flat, needed: int) -> None:
    """Check that an array has `needed` rows."""
    if _rows(flat) != needed:
        raise InvalidRequest(f"{what} has {_rows(flat)} rows; the counts say {needed}")


def _match(result: Flat, shape: tuple[int, ...], dtype: DType, device: bool) -> None:
    if (result.shape, result.dtype, result.device) != (shape, dtype, device):
        where = "device" if device else "host"
        raise InvalidRequest(
            f"out is {result.dtype.value}{list(result.shape)}; needed is {dtype.value}{list(shape)} in {where} memory"
        )
