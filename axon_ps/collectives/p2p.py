"""Exchanges between ranks that cannot deadlock: `sendrecv`, and `batch_isend_irecv` of torch.distributed.

Owns: that all messages of an exchange are started before any of them is waited for. So ranks may send in rings and to
each other, in any order, although a send may block until its receiver comes.

Messages of the same sender, receiver and tag arrive in the order of the calls. Ranks are positions in the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from axon_ps.collectives import arguments, arrays
from axon_ps.collectives.arguments import Seconds, rank_names
from axon_ps.collectives.arrays import T
from axon_ps.collectives.functional import Group, current_group
from axon_ps.collectives.process_group import ANY_SOURCE
from axon_ps.collectives.work import Work
from axon_ps.errors import AxonError, InvalidRequest

if TYPE_CHECKING:
    from axon_ps.collectives.arrays import AnyArray


@rank_names("dst")
def isend(tensor: AnyArray, dst: int, group: Group = None, tag: int = 0, *, timeout_s: Seconds = None) -> Work[None]:
    """Call `send` with `async_op=True`, by torch's name: an array of any shape, and of a dtype that `dst` expects.

    It raises as `ProcessGroup.send`.
    """
    return current_group(group).send(tensor, dst, tag=tag, timeout_s=timeout_s, async_op=True)


@rank_names("src")
def irecv(
    tensor: AnyArray, src: int = ANY_SOURCE, group: Group = None, tag: int = 0, *, timeout_s: Seconds = None
) -> Work[int]:
    """Call `recv` with `async_op=True`, by torch's name. The handle's `wait()` returns the sender.

    The array has as many elements as the message, and its dtype. It raises as `ProcessGroup.recv`.
    """
    return current_group(group).recv(tensor, src, tag=tag, timeout_s=timeout_s, async_op=True)


@dataclass(frozen=True)
class P2POp:
    """One message of a `batch_isend_irecv`, as torch's class.

    Attributes:
        op: `axon_ps.isend` or `axon_ps.irecv`.
        tensor: the array to send, or to fill.
        peer: the receiver, or the sender.
        group: the ranks; None = all workers of the current world.
        tag: a receive takes messages with its tag.

    Raises:
        InvalidRequest: `op` is another function.
    """

    op: Callable[..., Work[Any]]
    tensor: AnyArray
    peer: int
    group: Group = None
    tag: int = 0

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise InvalidRequest(f"the op of a P2POp is {self.op!r}; give axon_ps.isend or axon_ps.irecv")


def batch_isend_irecv(p2p_op_list: Sequence[P2POp], *, timeout_s: Seconds = None) -> list[Work[Any]]:
    """Start many sends and receives, in any order; return their handles, in the order given.

    Raises:
        InvalidRequest: the list is empty, or one of them cannot be done; those before it are started.
    """
    if not p2p_op_list:
        raise InvalidRequest("batch_isend_irecv was given nothing; it needs at least one P2POp")
    return [p.op(p.tensor, p.peer, p.group, p.tag, timeout_s=timeout_s) for p in p2p_op_list]


@rank_names("src")
@rank_names("dst")
def sendrecv(
    data: T,
    dst: int,
    src: int | None = None,
    group: Group = None,
    *,
    out: T | None = None,
    tag: int = 0,
    timeout_s: Seconds = None,
) -> T:
    """Send an array to one rank while another is received: to the right and from the left, say.

    Args:
        data: the array to send; only read.
        dst: the receiver. It may be this rank, if `src` is, too.
        src: the sender; None = `dst`, which makes it an exchange of two.
        group: the ranks; None = all workers of the current world.
        out: the array for the message; None = a new one like `data`. It must not overlap `data`.
        tag: the tag of both messages.
        timeout_s: seconds that it may take.

    Returns:
        The array that holds the received message.

    Raises:
        InvalidRequest: only one of `dst` and `src` is this rank; nothing was sent.
        Disagreement: the sender's message has another size or dtype, or the receiver expected another.

    After an error: `data` may have been received all the same.
    """
    chosen = current_group(group)
    source = dst if src is None else src
    given = arrays.flatten(data, writable=False)
    received: Any = arrays.empty_like(data, given.shape) if out is None else out
    if (chosen.rank == dst) != (chosen.rank == source):
        raise InvalidRequest(
            f"rank {chosen.rank} was to send to {dst} and receive from {source}: from itself, only if both"
        )
    if chosen.rank == dst:
        _, target, _ = arguments.result_like(given, received)
        target.array[...] = given.array
        target.finish()
        return cast("T", received)
    receiving = irecv(received, source, chosen, tag, timeout_s=timeout_s)
    sending = isend(given, dst, chosen, tag, timeout_s=timeout_s)
    try:
        receiving.wait()
    except BaseException:
        with contextlib.suppress(AxonError):  # the error of the receive is more precise
            sending.wait()
        raise
    sending.wait()
    return cast("T", received)
