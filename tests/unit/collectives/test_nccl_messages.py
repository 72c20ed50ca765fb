"""Messages between GPUs, with a store and a transport of this process: tags, any source, sizes that do not fit.

Tests of `collectives/backends/nccl/messages.py`.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.nccl.messages import Messages, Move
from axon_ps.collectives.backends.nccl.symbols import NcclUniqueId
from axon_ps.errors import Disagreement, MemberLost, Timeout
from axon_ps.types import Array, DType

LONG_S = 20.0
ANY = -1


class Transport:
    """Moves bytes between two ends in order, one message at a time, as a communicator of two ranks does."""

    def __init__(self) -> None:
        self._made = 0
        self._pipes: defaultdict[bytes, queue.Queue[Array]] = defaultdict(lambda: queue.Queue(1))
        self._lock = threading.Lock()

    def unique_id(self) -> NcclUniqueId:
        with self._lock:
            self._made += 1
            return NcclUniqueId(self._made.to_bytes(128, "big"))

    def connect(self, unique_id: NcclUniqueId, end: int) -> Move:
        pipe = self._pipes[unique_id.value]

        def move(data: Array, dtype: DType) -> None:
            if end == 0:
                pipe.put(data.copy(), timeout=LONG_S)
            else:
                np.copyto(data, pipe.get(timeout=LONG_S))

        return move


def messages(world_size: int) -> list[Messages]:
    transport = Transport()
    contexts = mock_contexts(world_size, ranks=range(10, 10 + world_size))
    return [Messages(context, transport.connect, transport.unique_id) for context in contexts]


def send(rank: Messages, value: float, to: int, tag: int = 0, numel: int = 2, timeout_s: float = LONG_S) -> None:
    rank.send(np.full(numel, value, np.float32), DType.F32, to, tag, timeout_s)


def received(rank: Messages, source: int, tag: int = 0, numel: int = 2) -> tuple[int, list[float]]:
    data = np.zeros(numel, np.float32)
    return rank.recv(data, DType.F32, source, tag, LONG_S), data.tolist()


def test_messages_of_a_tag_keep_their_order_and_tags_are_apart() -> None:
    sender, receiver = messages(2)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(send, sender, 1.0, 1)
        assert received(receiver, 0) == (0, [1.0, 1.0])
        first.result(LONG_S)
        waiting = pool.submit(send, sender, 2.0, 1, tag=3)
        later = pool.submit(send, sender, 3.0, 1)
        assert received(receiver, 0) == (0, [3.0, 3.0])
        assert received(receiver, 0, tag=3) == (0, [2.0, 2.0])
        for sending in (waiting, later):
            sending.result(LONG_S)


def test_any_rank_may_be_the_sender() -> None:
    everybody = messages(3)
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, everybody[rank], float(rank), 0) for rank in (1, 2)]
        got = dict(received(everybody[0], ANY) for _ in range(2))
        assert got == {1: [1.0, 1.0], 2: [2.0, 2.0]}
        for one in sending:
            one.result(LONG_S)


def test_an_empty_message_moves_nothing() -> None:
    sender, receiver = messages(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sender, 0.0, 1, numel=0)
        assert received(receiver, 0, numel=0) == (0, [])
        sending.result(LONG_S)


def test_a_message_of_another_size_is_dropped_at_both_ends_and_the_next_one_arrives() -> None:
    sender, receiver = messages(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sender, 1.0, 1, tag=4, numel=3)
        with pytest.raises(Disagreement) as at_the_receiver:
            received(receiver, 0, tag=4)
        with pytest.raises(Disagreement) as at_the_sender:
            sending.result(LONG_S)
        sending = pool.submit(send, sender, 2.0, 1, tag=4)
        assert received(receiver, 0, tag=4) == (0, [2.0, 2.0])
        sending.result(LONG_S)
    for error in (at_the_receiver.value, at_the_sender.value):
        assert "a message with tag 4 in group 'mock'" in str(error)
        assert "rank 10" in str(error)
        assert "send of 3 f32" in str(error)
        assert "rank 11" in str(error)
        assert "recv of 2 f32" in str(error)


def test_a_wait_ends_with_its_time_or_with_the_group() -> None:
    sender, receiver = messages(2)
    with pytest.raises(Timeout):
        send(sender, 1.0, 1, timeout_s=0.01)
    for source in (0, ANY):
        with pytest.raises(Timeout):
            receiver.recv(np.zeros(1, np.float32), DType.F32, source, 9, 0.01)
    receiver.abort(MemberLost("rank 10 is gone"))
    with pytest.raises(MemberLost, match="^rank 10 is gone$"):
        received(receiver, 0, tag=9)
