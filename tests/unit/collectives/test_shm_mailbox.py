"""send and recv on one host, as two ranks of this process see them: order, tags, fragments, what does not fit.

Tests of `collectives/backends/shm/mailbox.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from axon_ps.collectives.backends.shm.control import RING_ENTRIES, Control, ControlLayout
from axon_ps.collectives.backends.shm.exchange import PeerMemory
from axon_ps.collectives.backends.shm.mailbox import ShmMailbox
from axon_ps.errors import Broken, Disagreement, Timeout
from axon_ps.host import shared_memory
from axon_ps.types import Array, DType

LONG_S = 20.0
ANY = -1


def mailboxes(world_size: int = 2) -> list[ShmMailbox]:
    """The mailboxes of ranks that cannot map each other's arrays, so that all bytes go through the rings."""
    layout = ControlLayout(world_size)
    segment, memory = shared_memory.create(layout.size_bytes)
    segment.close()
    ranks = range(10, 10 + world_size)
    controls = [Control(memory, layout, rank, ranks, "a group") for rank in range(world_size)]
    return [ShmMailbox(control, PeerMemory(control, [None] * world_size, 4096)) for control in controls]


def numbers(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def send(mailbox: ShmMailbox, data: Array, to: int = 1, tag: int = 0) -> None:
    mailbox.send(data, DType.F32, to, tag, LONG_S)


def received(mailbox: ShmMailbox, numel: int, source: int = 0, tag: int = 0) -> tuple[int, Array]:
    data = np.zeros(numel, np.float32)
    return mailbox.recv(data, DType.F32, source, tag, LONG_S), data


def test_small_messages_wait_for_their_receiver_and_keep_the_order_of_their_tag() -> None:
    sender, receiver = mailboxes()
    for tag, number in ((0, 1), (5, 2), (0, 3)):
        send(sender, np.full(3, number, np.float32), tag=tag)
    assert [received(receiver, 3, tag=tag)[1][0] for tag in (5, 0, 0)] == [2.0, 1.0, 3.0]
    assert (sender.bytes_sent, receiver.bytes_received) == (36, 36)


def test_a_message_of_any_rank_tells_who_sent_it() -> None:
    first, second, receiver = mailboxes(3)
    send(second, np.array([2.0], np.float32), to=2)
    assert received(receiver, 1, ANY)[0] == 1
    send(first, np.array([1.0], np.float32), to=2)
    source, data = received(receiver, 1, ANY)
    assert (source, data.tolist()) == (0, [1.0])


def test_an_empty_message_is_one() -> None:
    sender, receiver = mailboxes()
    send(sender, numbers(0))
    source, data = received(receiver, 0)
    assert (source, data.size) == (0, 0)


def test_large_messages_both_ways_come_through_rings_that_are_full() -> None:
    """A message of more bytes than its ring has goes on while its sender receives the other one."""
    pair = mailboxes()
    ring_bytes = RING_ENTRIES * ControlLayout(2).payload_bytes
    numel = 3 * ring_bytes // 4 + 7
    sent = [numbers(numel, rank) for rank in range(2)]

    def exchange(rank: int) -> Array:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, pair[rank], sent[rank], to=1 - rank)
            _, data = received(pair[rank], numel, 1 - rank)
            sending.result(LONG_S)
        return data

    with ThreadPoolExecutor(2) as pool:
        results = [f.result(LONG_S) for f in [pool.submit(exchange, rank) for rank in range(2)]]
    for rank in range(2):
        np.testing.assert_array_equal(results[rank], sent[1 - rank])


@pytest.mark.parametrize("numel", [4, 100_000])
def test_a_message_of_another_size_is_refused_and_the_next_one_arrives(numel: int) -> None:
    """The sender of a large message is told; that of a small one has gone on."""
    sender, receiver = mailboxes()
    words = rf"rank 10 sends {numel} f32 to rank 11, which expects 3 f32 \(tag 7\)"
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sender, numbers(numel), tag=7)
        with pytest.raises(Disagreement, match=words):
            received(receiver, 3, tag=7)
        if numel > 4:
            with pytest.raises(Disagreement, match=words):
                sending.result(LONG_S)
        else:
            sending.result(LONG_S)
    send(sender, numbers(4, 1), tag=7)
    np.testing.assert_array_equal(received(receiver, 4, tag=7)[1], numbers(4, 1))


def test_a_message_of_another_dtype_is_refused() -> None:
    sender, receiver = mailboxes()
    send(sender, numbers(2))
    with pytest.raises(Disagreement, match="sends 2 f32 to rank 11, which expects 2 i32"):
        receiver.recv(np.zeros(2, np.int32), DType.I32, 0, 0, LONG_S)


def test_a_sender_that_does_not_come_is_named_and_ends_the_group() -> None:
    sender, receiver = mailboxes()
    with pytest.raises(Timeout, match="rank 10 did not come to what group 'a group' does"):
        receiver.recv(np.zeros(1, np.float32), DType.F32, 0, 0, 0.01)
    with pytest.raises(Broken, match="rank 10 did not come"):
        send(sender, numbers(1))
