"""Object collectives: small values of Python instead of arrays. `axon_ps.all_gather_object(loss)`.

Owns: the functions with torch.distributed's names. They are for settings, metrics and file names; arrays have
collectives that copy less. `collectives.encoding` lists the types that can be sent; nothing is ever pickled.

Every function takes `group` and `timeout_s` and raises as those of `collectives.functional`, and also

    InvalidRequest: a value cannot be sent, or is larger than `MAX_OBJECT_BYTES`; the other ranks of a collective get a
        `Disagreement` with the reason. The group can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from axon_ps.collectives.arguments import Seconds, rank_names
from axon_ps.collectives.encoding import decode, encode
from axon_ps.collectives.functional import Group, current_group
from axon_ps.collectives.process_group import ANY_SOURCE, ProcessGroup
from axon_ps.errors import InvalidRequest

MAX_OBJECT_BYTES = 64 << 20
"""The most bytes of an encoded value, or list of values."""

V = TypeVar("V")
Bytes = npt.NDArray[np.uint8]


def all_gather_object(obj: V, group: Group = None, *, timeout_s: Seconds = None) -> list[V]:
    """Return every rank's value, by rank, on every rank."""
    chosen, what = current_group(group), "all_gather_object"
    with chosen.calls.preparing(what, False, timeout_s, False):
        ours = _encoded(obj, what)
    sizes = _sizes(chosen, ours.size, timeout_s)
    payloads = chosen.all_gather(ours, counts=sizes, timeout_s=timeout_s)
    return _decoded(payloads, sizes, what)


@rank_names("dst")
def gather_object(obj: V, dst: int = 0, group: Group = None, *, timeout_s: Seconds = None) -> list[V] | None:
    """Return every rank's value, by rank, on rank `dst`, and None elsewhere."""
    chosen, what = current_group(group), "gather_object"
    with chosen.calls.preparing(what, False, timeout_s, False):
        chosen.calls.members.checked_rank(dst, f"dst of {what}")
        ours = _encoded(obj, what)
    sizes = _sizes(chosen, ours.size, timeout_s)
    payloads = chosen.gather(ours, dst, counts=sizes, timeout_s=timeout_s)
    return None if payloads is None else _decoded(payloads, sizes, what)


@rank_names("src")
def broadcast_object_list(
    object_list: list[V], src: int = 0, group: Group = None, *, timeout_s: Seconds = None
) -> list[V]:
    """Replace the items of `object_list` by those of rank `src`'s; return it.

    Args:
        object_list: a list of the same length on every rank; only rank `src`'s items are used.
        src: the rank that has the values.
        group: see this module.
        timeout_s: see this module.

    Raises:
        InvalidRequest: the ranks' lists differ in length; every rank gets it.
    """
    chosen, what = current_group(group), "broadcast_object_list"
    with chosen.calls.preparing(what, False, timeout_s, False):
        chosen.calls.members.checked_rank(src, f"src of {what}")
        ours = _encoded(list(object_list), what) if chosen.rank == src else np.empty(0, np.uint8)
    announced = chosen.all_gather(np.array([[ours.size, len(object_list)]]), timeout_s=timeout_s)
    lengths = announced[:, 1].tolist()
    if len(set(lengths)) > 1:
        raise InvalidRequest(f"{what} was given lists of {lengths} items, by rank; all must be as long")
    data = ours if chosen.rank == src else np.empty(_checked(int(announced[src, 0]), what), np.uint8)
    chosen.broadcast(data, src, timeout_s=timeout_s)
    if chosen.rank != src:
        object_list[:] = decode(data.tobytes(), what)
    return object_list


@rank_names("src")
def scatter_object_list(
    object_list: Sequence[V] | None, src: int = 0, group: Group = None, *, timeout_s: Seconds = None
) -> V:
    """Return this rank's item of rank `src`'s list, which has one for each rank; elsewhere the list may be None."""
    chosen, what = current_group(group), "scatter_object_list"
    with chosen.calls.preparing(what, False, timeout_s, False):
        chosen.calls.members.checked_rank(src, f"src of {what}")
        payloads = []
        if chosen.rank == src:
            if object_list is None or len(object_list) != chosen.size:
                given = "None" if object_list is None else f"{len(object_list)} values"
                raise InvalidRequest(
                    f"{what} was given {given} on rank {src}; it needs one for each of {chosen.size} ranks"
                )
            payloads = [_encoded(value, what) for value in object_list]
    sizes = np.array([payload.size for payload in payloads] if payloads else [0] * chosen.size, np.int64)
    chosen.broadcast(sizes, src, timeout_s=timeout_s)
    counts = [_checked(int(size), what) for size in sizes]
    ours = np.empty(counts[chosen.rank], np.uint8)
    chosen.scatter(np.concatenate(payloads) if payloads else None, src, out=ours, counts=counts, timeout_s=timeout_s)
    return cast("V", decode(ours.tobytes(), what))


@rank_names("dst")
def send_object_list(
    object_list: Sequence[Any],
    dst: int,
    group: Group = None,
    *,
    tag: int = 0,
    timeout_s: Seconds = None,
) -> None:
    """Send values to rank `dst`, which must `recv_object_list` as many with the same tag."""
    chosen = current_group(group)
    data = _encoded(list(object_list), "send_object_list")
    chosen.send(np.array([data.size, len(object_list)]), dst, tag=tag, timeout_s=timeout_s)
    chosen.send(data, dst, tag=tag, timeout_s=timeout_s)


@rank_names("src")
def recv_object_list(
    object_list: list[Any],
    src: int = ANY_SOURCE,
    group: Group = None,
    *,
    tag: int = 0,
    timeout_s: Seconds = None,
) -> int:
    """Replace the items of `object_list` by those that rank `src` (-1: any) has sent; return the sender.

    Raises:
        InvalidRequest: another number of values was sent; they are dropped.
    """
    chosen, what = current_group(group), "recv_object_list"
    head = np.empty(2, np.int64)
    sender = chosen.recv(head, src, tag=tag, timeout_s=timeout_s)
    size, length = _checked(int(head[0]), what), int(head[1])
    data = np.empty(size, np.uint8)
    chosen.recv(data, sender, tag=tag, timeout_s=timeout_s)
    if length != len(object_list):
        raise InvalidRequest(f"{what} was given a list of {len(object_list)} items; rank {sender} has sent {length}")
    object_list[:] = decode(data.tobytes(), what)
    return sender


def _encoded(value: Any, what: str) -> Bytes:
    data = encode(value, what)
    _checked(len(data), what)
    return np.frombuffer(data, np.uint8)


def _checked(size: int, what: str) -> int:
    """Return a size, after a check that it is allowed."""
    if not 0 <= size <= MAX_OBJECT_BYTES:
        raise InvalidRequest(
            f"a value of {what} has {size} bytes; at most {MAX_OBJECT_BYTES} can be sent: send arrays as arrays"
        )
    return size


def _sizes(group: ProcessGroup, size: int, timeout_s: Seconds) -> list[int]:
    """Return every rank's number of bytes. Collective."""
    sizes = group.all_gather(np.array([size]), timeout_s=timeout_s)
    return [_checked(int(s), "another rank") for s in sizes]


def _decoded(payloads: Bytes, sizes: Sequence[int], what: str) -> list[Any]:
    ends = accumulate(sizes, initial=0)
    return [decode(payloads[begin:end].tobytes(), what) for begin, end in pairwise(ends)]
