"""Collectives as functions: `axon_ps.all_reduce_mean(x)`, over the current world or a group given.

Owns: the functional names. Every function that communicates takes

    group: the ranks that take part; may also be given by position, as in torch. A world stands for its default group;
        None = all workers of the current world (`World.current()`)
    timeout_s: seconds that it may take; None = the world's default
    async_op: return a `Work` at once, whose `wait()` returns the function's result

and raises the errors of the methods of `ProcessGroup`, and `Misuse` without a group when there is no current world.
After an error: see `ProcessGroup`. Ranks are positions in the group.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast, overload

import numpy as np

from axon_ps.collectives import arrays, current_world
from axon_ps.collectives.arguments import Async, Counts, Seconds, Shape, Sync, rank_names
from axon_ps.collectives.arrays import Flat, T
from axon_ps.collectives.process_group import ANY_SOURCE, ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.types import Array, DType, ReduceOp

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from axon_ps.collectives.arrays import AnyArray
    from axon_ps.collectives.current_world import JobWorld

Group: TypeAlias = "ProcessGroup | JobWorld | None"
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

BUCKET_BYTES = 25 << 20
"""The bytes of several gradients that `sync_gradients` puts into one all-reduce; PyTorch's DDP has the same default."""


def current_group(group: Group = None) -> ProcessGroup:
    """Return the given group, or all workers of the given world, or all workers of the current world.

    Raises:
        Misuse: none was given, and this process is in no world.
        InvalidRequest: something else was given.
    """
    if group is not None:
        return as_group(group)
    world = current_world.current()
    if world is None:
        raise Misuse("there is no current world; call axon_ps.World.init() first, or pass group=")
    default_group: ProcessGroup = world.default_group
    return default_group


def as_group(given: Any) -> ProcessGroup:
    """Return a group, or the default group of a world.

    Raises:
        InvalidRequest: it is neither.
    """
    group: ProcessGroup | None = getattr(given, "default_group", given)
    if not hasattr(group, "all_reduce"):
        raise InvalidRequest(f"group is {reprlib.repr(given)}; give a ProcessGroup, or a World for all of its workers")
    return cast("ProcessGroup", group)


def rank(group: Group = None) -> int:
    """Return this worker's position."""
    return current_group(group).rank


def world_size(group: Group = None) -> int:
    """Return the number of workers."""
    return current_group(group).world_size


def is_main_process(group: Group = None) -> bool:
    """Return True on the first rank, which logs and saves."""
    return current_group(group).rank == 0


def _with_op(function: Function, op: ReduceOp, name: str, text: str) -> Function:
    """Return `function` with an operation, under a name. Editors show the strings below the names."""

    @functools.wraps(function)
    def made(*args: Any, **given: Any) -> Any:
        return function(*args, op=op, **given)

    signature = inspect.signature(function)
    visible = [parameter for parameter in signature.parameters.values() if parameter.name != "op"]
    made.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    made.__name__ = made.__qualname__ = name
    made.__doc__ = text.format(op=op.value)
    return cast("Function", made)


@overload
def _all_reduce(
    data: T, group: Group = None, *, out: T | None = None, timeout_s: Seconds = None, async_op: Sync = False
) -> T: ...
@overload
def _all_reduce(
    data: T, group: Group = None, *, out: T | None = None, timeout_s: Seconds = None, async_op: Async
) -> Work[T]: ...
@overload
def _all_reduce(
    data: T, group: Group = None, *, out: T | None = None, timeout_s: Seconds = None, async_op: bool
) -> T | Work[T]: ...
def _all_reduce(
    data: Any,
    group: Group = None,
    *,
    op: ReduceOp = ReduceOp.SUM,
    out: Any = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    return current_group(group).all_reduce(data, op, out=out, timeout_s=timeout_s, async_op=async_op)


_ALL_REDUCE = """Replace `data` (or `out`, if given) by the {op} of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
all_reduce_sum = _with_op(_all_reduce, ReduceOp.SUM, "all_reduce_sum", _ALL_REDUCE)
"""Replace `data` (or `out`, if given) by the sum of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
all_reduce_mean = _with_op(_all_reduce, ReduceOp.AVERAGE, "all_reduce_mean", _ALL_REDUCE)
"""Replace `data` (or `out`, if given) by the average of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
all_reduce_min = _with_op(_all_reduce, ReduceOp.MIN, "all_reduce_min", _ALL_REDUCE)
"""Replace `data` (or `out`, if given) by the min of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
all_reduce_max = _with_op(_all_reduce, ReduceOp.MAX, "all_reduce_max", _ALL_REDUCE)
"""Replace `data` (or `out`, if given) by the max of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
all_reduce_product = _with_op(_all_reduce, ReduceOp.PRODUCT, "all_reduce_product", _ALL_REDUCE)
"""Replace `data` (or `out`, if given) by the product of all ranks' data, of one shape and dtype; return it.

It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""


@overload
def all_reduce_sum_group(
    data: T, group: ProcessGroup | JobWorld, *, out: T | None = None, timeout_s: Seconds = None, async_op: Sync = False
) -> T: ...
@overload
def all_reduce_sum_group(
    data: T, group: ProcessGroup | JobWorld, *, out: T | None = None, timeout_s: Seconds = None, async_op: Async
) -> Work[T]: ...
@overload
def all_reduce_sum_group(
    data: T, group: ProcessGroup | JobWorld, *, out: T | None = None, timeout_s: Seconds = None, async_op: bool
) -> T | Work[T]: ...
def all_reduce_sum_group(
    data: Any, group: ProcessGroup | JobWorld, *, out: Any = None, timeout_s: Seconds = None, async_op: bool = False
) -> Any:
    """Do `all_reduce_sum` over a group that must be given, with data of one shape and dtype on all ranks.

    It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return all_reduce_sum(data, out=out, group=group, timeout_s=timeout_s, async_op=async_op)


@overload
def broadcast(data: T, group: Group = None, *, timeout_s: Seconds = None, async_op: Sync = False) -> T: ...
@overload
def broadcast(data: T, group: Group = None, *, timeout_s: Seconds = None, async_op: Async) -> Work[T]: ...
@overload
def broadcast(data: T, group: Group = None, *, timeout_s: Seconds = None, async_op: bool) -> T | Work[T]: ...
def broadcast(data: Any, group: Group = None, *, timeout_s: Seconds = None, async_op: bool = False) -> Any:
    """Replace `data` by that of the first rank, of the same shape and dtype; return it.

    It raises as `ProcessGroup.broadcast`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return broadcast_from(data, 0, group=group, timeout_s=timeout_s, async_op=async_op)


@overload
def broadcast_from(
    data: T, src: int, group: Group = None, *, timeout_s: Seconds = None, async_op: Sync = False
) -> T: ...
@overload
def broadcast_from(
    data: T, src: int, group: Group = None, *, timeout_s: Seconds = None, async_op: Async
) -> Work[T]: ...
@overload
def broadcast_from(
    data: T, src: int, group: Group = None, *, timeout_s: Seconds = None, async_op: bool
) -> T | Work[T]: ...
@rank_names("src")
def broadcast_from(
    data: Any, src: int, group: Group = None, *, timeout_s: Seconds = None, async_op: bool = False
) -> Any:
    """Replace `data` by that of rank `src`, of the same shape and dtype; return it.

    It raises as `ProcessGroup.broadcast`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return current_group(group).broadcast(data, src, timeout_s=timeout_s, async_op=async_op)


@overload
def all_gather(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> T: ...
@overload
def all_gather(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[T]: ...
@overload
def all_gather(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool,
) -> T | Work[T]: ...
def all_gather(
    data: Any,
    group: Group = None,
    *,
    out: Any = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    """Gather all ranks' data, [rows, ...] each, along the first dimension: [all rows, ...].

    It raises as `ProcessGroup.all_gather`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    chosen = current_group(group)
    return chosen.all_gather(data, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


@overload
def _reduce_scatter(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> T: ...
@overload
def _reduce_scatter(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[T]: ...
@overload
def _reduce_scatter(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool,
) -> T | Work[T]: ...
def _reduce_scatter(
    data: Any,
    group: Group = None,
    *,
    op: ReduceOp = ReduceOp.SUM,
    out: Any = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    chosen = current_group(group)
    return chosen.reduce_scatter(data, op, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


_REDUCE_SCATTER = """Return this rank's rows of the {op} of all ranks' data, [rows, ...] of one shape and dtype.

It raises as `ProcessGroup.reduce_scatter`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
reduce_scatter_sum = _with_op(_reduce_scatter, ReduceOp.SUM, "reduce_scatter_sum", _REDUCE_SCATTER)
"""Return this rank's rows of the sum of all ranks' data, [rows, ...] of one shape and dtype.

It raises as `ProcessGroup.reduce_scatter`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""
reduce_scatter_mean = _with_op(_reduce_scatter, ReduceOp.AVERAGE, "reduce_scatter_mean", _REDUCE_SCATTER)
"""Return this rank's rows of the average of all ranks' data, [rows, ...] of one shape and dtype.

It raises as `ProcessGroup.reduce_scatter`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
"""


@overload
def gather_tensor(
    data: T,
    dst: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> T | None: ...
@overload
def gather_tensor(
    data: T,
    dst: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[T | None]: ...
@overload
def gather_tensor(
    data: T,
    dst: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool,
) -> T | Work[T | None] | None: ...
@rank_names("dst")
def gather_tensor(
    data: Any,
    dst: int = 0,
    group: Group = None,
    *,
    out: Any = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    """Gather all ranks' data, [rows, ...] each, on rank `dst` along the first dimension; return None elsewhere.

    It raises as `ProcessGroup.gather`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    chosen = current_group(group)
    return chosen.gather(data, dst, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


@overload
def scatter_tensor(
    data: T | None,
    src: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> T: ...
@overload
def scatter_tensor(
    data: T | None,
    src: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[T]: ...
@overload
def scatter_tensor(
    data: T | None,
    src: int = 0,
    group: Group = None,
    *,
    out: T | None = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool,
) -> T | Work[T]: ...
@rank_names("src")
def scatter_tensor(
    data: Any,
    src: int = 0,
    group: Group = None,
    *,
    out: Any = None,
    counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    """Return this rank's rows of rank `src`'s data: [rows, ...] of [all rows, ...].

    It raises as `ProcessGroup.scatter`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    chosen = current_group(group)
    return chosen.scatter(data, src, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


@overload
def all_to_all(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    output_counts: Counts = None,
    input_counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> T: ...
@overload
def all_to_all(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    output_counts: Counts = None,
    input_counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[T]: ...
@overload
def all_to_all(
    data: T,
    group: Group = None,
    *,
    out: T | None = None,
    output_counts: Counts = None,
    input_counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool,
) -> T | Work[T]: ...
def all_to_all(
    data: Any,
    group: Group = None,
    *,
    out: Any = None,
    output_counts: Counts = None,
    input_counts: Counts = None,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    """Exchange partitions of [rows, ...]: number i of the result is rank i's for this rank.

    It raises as `ProcessGroup.all_to_all`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return current_group(group).all_to_all(
        data,
        out=out,
        output_counts=output_counts,
        input_counts=input_counts,
        timeout_s=timeout_s,
        async_op=async_op,
    )


@overload
def barrier(group: Group = None, *, timeout_s: Seconds = None, async_op: Sync = False) -> None: ...
@overload
def barrier(group: Group = None, *, timeout_s: Seconds = None, async_op: Async) -> Work[None]: ...
@overload
def barrier(group: Group = None, *, timeout_s: Seconds = None, async_op: bool) -> Work[None] | None: ...
def barrier(group: Group = None, *, timeout_s: Seconds = None, async_op: bool = False) -> Any:
    """Return when every rank has called it, within `timeout_s` seconds.

    It raises as `ProcessGroup.barrier`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return current_group(group).barrier(timeout_s, async_op=async_op)


@overload
def send(
    data: AnyArray, dst: int, group: Group = None, *, tag: int = 0, timeout_s: Seconds = None, async_op: Sync = False
) -> None: ...
@overload
def send(
    data: AnyArray, dst: int, group: Group = None, *, tag: int = 0, timeout_s: Seconds = None, async_op: Async
) -> Work[None]: ...
@overload
def send(
    data: AnyArray, dst: int, group: Group = None, *, tag: int = 0, timeout_s: Seconds = None, async_op: bool
) -> Work[None] | None: ...
@rank_names("dst")
def send(
    data: Any, dst: int, group: Group = None, *, tag: int = 0, timeout_s: Seconds = None, async_op: bool = False
) -> Any:
    """Send an array of any shape to rank `dst`, which expects as many elements of its dtype.

    It raises as `ProcessGroup.send`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return current_group(group).send(data, dst, tag=tag, timeout_s=timeout_s, async_op=async_op)


@overload
def recv(
    out: AnyArray,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> int: ...
@overload
def recv(
    out: AnyArray,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[int]: ...
@overload
def recv(
    out: AnyArray,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    timeout_s: Seconds = None,
    async_op: bool,
) -> int | Work[int]: ...
@overload
def recv(
    out: None = None,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    shape: Shape,
    dtype: DTypeLike = np.float32,
    timeout_s: Seconds = None,
    async_op: Sync = False,
) -> Array: ...
@overload
def recv(
    out: None = None,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    shape: Shape,
    dtype: DTypeLike = np.float32,
    timeout_s: Seconds = None,
    async_op: Async,
) -> Work[Array]: ...
@overload
def recv(
    out: None = None,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    shape: Shape,
    dtype: DTypeLike = np.float32,
    timeout_s: Seconds = None,
    async_op: bool,
) -> Array | Work[Array]: ...
@rank_names("src")
def recv(
    out: Any = None,
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    shape: Shape | None = None,
    dtype: DTypeLike = np.float32,
    timeout_s: Seconds = None,
    async_op: bool = False,
) -> Any:
    """Fill `out` with the next message of rank `src` (-1: of any); return its sender. See `ProcessGroup.recv`.

    Without `out` return a new array of `shape` and `dtype` with the message.

    Raises:
        InvalidRequest: a rank was given for `out`, as in the Rust crates, or a group for `src`.
    """
    if isinstance(out, int) or not isinstance(src, (int, np.integer)):
        raise InvalidRequest(
            f"recv() was given out={reprlib.repr(out)} and src={reprlib.repr(src)}; sizes do not travel ahead of a "
            "message, so give the array to fill, recv(out, src, group), or its size, recv(src=0, group=group, shape=4)"
        )
    more: dict[str, Any] = {"shape": shape, "dtype": dtype, "timeout_s": timeout_s, "async_op": async_op}
    return current_group(group).recv(out, src, tag=tag, **more)


@overload
def sync_gradient(gradient: T, group: Group = None, *, timeout_s: Seconds = None, async_op: Sync = False) -> T: ...
@overload
def sync_gradient(gradient: T, group: Group = None, *, timeout_s: Seconds = None, async_op: Async) -> Work[T]: ...
@overload
def sync_gradient(gradient: T, group: Group = None, *, timeout_s: Seconds = None, async_op: bool) -> T | Work[T]: ...
def sync_gradient(gradient: Any, group: Group = None, *, timeout_s: Seconds = None, async_op: bool = False) -> Any:
    """Average one gradient over the ranks, of the same shape and dtype on all of them, in place; return it.

    It raises as `ProcessGroup.all_reduce`: `Disagreement`, `InvalidRequest`, `MemberLost`, `Timeout`.
    """
    return all_reduce_mean(gradient, group=group, timeout_s=timeout_s, async_op=async_op)


@overload
def sync_gradients(
    gradients: Iterable[AnyArray | None], group: Group = None, *, timeout_s: Seconds = None, async_op: Sync = False
) -> list[Any]: ...
@overload
def sync_gradients(
    gradients: Iterable[AnyArray | None], group: Group = None, *, timeout_s: Seconds = None, async_op: Async
) -> Work[list[Any]]: ...
@overload
def sync_gradients(
    gradients: Iterable[AnyArray | None], group: Group = None, *, timeout_s: Seconds = None, async_op: bool
) -> list[Any] | Work[list[Any]]: ...
def sync_gradients(
    gradients: Iterable[Any], group: Group = None, *, timeout_s: Seconds = None, async_op: bool = False
) -> Any:
    """Average many gradients over the ranks, in place; those in host memory go `BUCKET_BYTES` at a time.

    Args:
        gradients: arrays of any shapes and float dtypes, or torch parameters, of which the `.grad` is averaged. None,
            and a parameter without a gradient, is skipped, so the same ones must be missing on every rank.
        group: see this module.
        timeout_s: see this module.
        async_op: see this module.

    Returns:
        The list of the arrays that were averaged.

    Raises:
        Disagreement, InvalidRequest, MemberLost, Timeout: as `ProcessGroup.all_reduce_each`.
    """
    chosen = current_group(group)
    found = [g for g in map(_gradient, gradients) if g is not None]
    with chosen.calls.preparing("sync_gradients", any(map(arrays.on_device, found)), timeout_s, async_op):
        flats = [arrays.flatten(g, what="a gradient") for g in found]
    buckets = [[f] for f in flats if f.device] + list(_buckets([f for f in flats if not f.device]))
    packed = [_packed(bucket) for bucket in buckets]
    work = chosen.all_reduce_each(packed, ReduceOp.AVERAGE, timeout_s=timeout_s, async_op=True)

    def finish() -> list[Any]:
        work.wait()
        for bucket, flat in zip(buckets, packed, strict=True):
            _unpack(bucket, flat)
        return found

    return _after(work, finish) if async_op else finish()


def empty_shared(shape: Shape, dtype: Any = np.float32, *, group: Group = None) -> Any:
    """Make a numpy array in memory that the ranks of one host share.

    A large collective reads such arrays where they are, if every rank passes one. If the group has no shared memory the
    result is an ordinary array, which collectives copy as usual.

    Args:
        shape: its shape.
        dtype: numpy dtype or its name; for bf16 give `numpy.uint16` memory a torch view.
        group: the group whose collectives use it.

    Raises:
        InvalidRequest: numpy has no such dtype.
        Busy: there is not enough shared memory; the message has the bytes needed and available.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    wanted = arrays.numpy_dtype(dtype)
    allocate = getattr(current_group(group).backend_of(), "empty_shared", None)
    if allocate is None:
        return np.empty(sizes, wanted)
    raw = allocate((int(np.prod(sizes, dtype=np.int64)) * wanted.itemsize,), DType.U8)
    return raw.view(wanted).reshape(sizes)


def _gradient(item: Any) -> Any:
    if not arrays.is_torch(item):
        return item
    return item.grad if arrays.is_parameter(item) or (item.requires_grad and item.is_leaf) else item


def _buckets(flats: Sequence[Flat]) -> Iterable[list[Flat]]:
    """Yield gradients of one dtype together, up to `BUCKET_BYTES`, in their order."""
    by_dtype: dict[DType, list[Flat]] = defaultdict(list)
    for flat in flats:
        bucket = by_dtype[flat.dtype]
        if bucket and sum(f.array.nbytes for f in bucket) + flat.array.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = by_dtype[flat.dtype] = []
        bucket.append(flat)
    yield from (bucket for bucket in by_dtype.values() if bucket)


def _packed(bucket: Sequence[Flat]) -> Flat:
    """Return one array with all gradients of a bucket."""
    if len(bucket) == 1:
        return bucket[0]
    packed = np.concatenate([f.array for f in bucket])
    return Flat(packed, bucket[0].dtype, packed.shape)


def _unpack(bucket: Sequence[Flat], average: Flat) -> None:
    """Copy the averages back to the gradients."""
    begin = 0
    for flat in bucket if len(bucket) > 1 else ():
        flat.array[...] = average.array[begin : begin + flat.array.size]
        begin += flat.array.size
        flat.finish()


def _after(work: Work[Any], finish: Callable[[], Result]) -> Work[Result]:
    """Return a handle on `finish`, which runs when the work has ended."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def ended(_: object) -> None:
        try:
            future.set_result(finish())
        except BaseException as error:
            future.set_exception(error)

    work.on_end(ended)
    return Work(future, "sync_gradients")
