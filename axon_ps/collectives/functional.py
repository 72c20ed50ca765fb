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
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from axon_ps.collectives import arrays, current_world
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.process_group import ANY_SOURCE, ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.types import DType, ReduceOp

if TYPE_CHECKING:
    from axon_ps.collectives.current_world import JobWorld

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""The bytes of several gradients that `sync_gradients` puts into one all-reduce; PyTorch's DDP has the same default."""


def current_group(group: ProcessGroup | JobWorld | None = None) -> ProcessGroup:
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


def rank(group: ProcessGroup | JobWorld | None = None) -> int:
    """Return this worker's position."""
    return current_group(group).rank


def world_size(group: ProcessGroup | JobWorld | None = None) -> int:
    """Return the number of workers."""
    return current_group(group).world_size


def is_main_process(group: ProcessGroup | JobWorld | None = None) -> bool:
    """Return True on the first rank, which logs and saves."""
    return current_group(group).rank == 0


def _all_reduce(op: ReduceOp, suffix: str) -> Callable[..., Any]:
    def all_reduce(
        data: Any,
        group: ProcessGroup | JobWorld | None = None,
        *,
        out: Any = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        return current_group(group).all_reduce(data, op, out=out, timeout_s=timeout_s, async_op=async_op)

    all_reduce.__name__ = all_reduce.__qualname__ = f"all_reduce_{suffix}"
    all_reduce.__doc__ = (
        f"`data` (or `out`, if given) becomes the {op.value} of all ranks' data, element by element; returns it."
    )
    return all_reduce


all_reduce_sum = _all_reduce(ReduceOp.SUM, "sum")
all_reduce_mean = _all_reduce(ReduceOp.AVERAGE, "mean")
all_reduce_min = _all_reduce(ReduceOp.MIN, "min")
all_reduce_max = _all_reduce(ReduceOp.MAX, "max")
all_reduce_product = _all_reduce(ReduceOp.PRODUCT, "product")


def all_reduce_sum_group(
    data: Any,
    group: ProcessGroup | JobWorld,
    *,
    out: Any = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Do `all_reduce_sum` over a group that must be given."""
    return all_reduce_sum(data, out=out, group=group, timeout_s=timeout_s, async_op=async_op)


def broadcast(
    data: Any, group: ProcessGroup | JobWorld | None = None, *, timeout_s: float | None = None, async_op: bool = False
) -> Any:
    """Replace `data` by that of the first rank; return it."""
    return broadcast_from(data, 0, group=group, timeout_s=timeout_s, async_op=async_op)


def broadcast_from(
    data: Any,
    src: int,
    group: ProcessGroup | JobWorld | None = None,
    *,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Replace `data` by that of rank `src`; return it."""
    return current_group(group).broadcast(data, src, timeout_s=timeout_s, async_op=async_op)


def all_gather(
    data: Any,
    group: ProcessGroup | JobWorld | None = None,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gather all ranks' data along the first dimension; see `ProcessGroup.all_gather`."""
    chosen = current_group(group)
    return chosen.all_gather(data, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


def _reduce_scatter(op: ReduceOp, suffix: str) -> Callable[..., Any]:
    def reduce_scatter(
        data: Any,
        group: ProcessGroup | JobWorld | None = None,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        chosen = current_group(group)
        return chosen.reduce_scatter(data, op, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)

    reduce_scatter.__name__ = reduce_scatter.__qualname__ = f"reduce_scatter_{suffix}"
    reduce_scatter.__doc__ = (
        f"This rank's rows of the {op.value} of all ranks' data; see `ProcessGroup.reduce_scatter`."
    )
    return reduce_scatter


reduce_scatter_sum = _reduce_scatter(ReduceOp.SUM, "sum")
reduce_scatter_mean = _reduce_scatter(ReduceOp.AVERAGE, "mean")


def gather_tensor(
    data: Any,
    dst: int = 0,
    group: ProcessGroup | JobWorld | None = None,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gather all ranks' data on rank `dst`, along the first dimension; None elsewhere. See `ProcessGroup.gather`."""
    chosen = current_group(group)
    return chosen.gather(data, dst, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


def scatter_tensor(
    data: Any,
    src: int = 0,
    group: ProcessGroup | JobWorld | None = None,
    *,
    out: Any = None,
    counts: Sequence[int] | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Return this rank's rows of rank `src`'s data; see `ProcessGroup.scatter`."""
    chosen = current_group(group)
    return chosen.scatter(data, src, out=out, counts=counts, timeout_s=timeout_s, async_op=async_op)


def all_to_all(
    data: Any,
    group: ProcessGroup | JobWorld | None = None,
    *,
    out: Any = None,
    output_counts: Sequence[int] | None = None,
    input_counts: Sequence[int] | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Exchange partitions: number i of the result is rank i's for this rank; see `ProcessGroup.all_to_all`."""
    return current_group(group).all_to_all(
        data,
        out=out,
        output_counts=output_counts,
        input_counts=input_counts,
        timeout_s=timeout_s,
        async_op=async_op,
    )


def barrier(
    group: ProcessGroup | JobWorld | None = None, *, timeout_s: float | None = None, async_op: bool = False
) -> Any:
    """Return when every rank has called it."""
    return current_group(group).barrier(timeout_s, async_op=async_op)


def send(
    data: Any,
    dst: int,
    group: ProcessGroup | JobWorld | None = None,
    *,
    tag: int = 0,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send an array to rank `dst`; see `ProcessGroup.send`."""
    return current_group(group).send(data, dst, tag=tag, timeout_s=timeout_s, async_op=async_op)


def recv(
    out: Any = None,
    src: int = ANY_SOURCE,
    group: ProcessGroup | JobWorld | None = None,
    *,
    tag: int = 0,
    shape: int | Sequence[int] | None = None,
    dtype: Any = np.float32,
    timeout_s: float | None = None,
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
    more = {"shape": shape, "dtype": dtype, "timeout_s": timeout_s, "async_op": async_op}
    return current_group(group).recv(out, src, tag=tag, **more)


def sync_gradient(
    gradient: Any,
    group: ProcessGroup | JobWorld | None = None,
    *,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Average one gradient over the ranks, in place; return it."""
    return all_reduce_mean(gradient, group=group, timeout_s=timeout_s, async_op=async_op)


def sync_gradients(
    gradients: Iterable[Any],
    group: ProcessGroup | JobWorld | None = None,
    *,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Average many gradients over the ranks, in place; those in host memory go `BUCKET_BYTES` at a time.

    Args:
        gradients: arrays, or torch parameters, of which the `.grad` is averaged; None, and a parameter without a
            gradient, is skipped, so the same ones must be missing on every rank.
        group: see this module.
        timeout_s: see this module.
        async_op: see this module.

    Returns:
        The list of the arrays that were averaged.
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


def empty_shared(
    shape: int | Sequence[int], dtype: Any = np.float32, *, group: ProcessGroup | JobWorld | None = None
) -> Any:
    """Make a numpy array in memory that the ranks of one host share.

    A large collective reads such arrays where they are, if every rank passes one. If the group has no shared memory the
    result is an ordinary array, which collectives copy as usual.

    Args:
        shape: its shape.
        dtype: numpy dtype or its name; for bf16 give `numpy.uint16` memory a torch view.
        group: the group whose collectives use it.

    Raises:
        Busy: there is not enough shared memory; the message has the bytes needed and available.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    wanted = np.dtype(dtype)
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


def _after(work: Work[Any], finish: Callable[[], T]) -> Work[T]:
    """Return a handle on `finish`, which runs when the work has ended."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def ended(_: object) -> None:
        try:
            future.set_result(finish())
        except BaseException as error:
            future.set_exception(error)

    work.on_end(ended)
    return Work(future, "sync_gradients")
