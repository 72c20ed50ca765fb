"""Host buffers: what is reused, what is pooled, and what is counted."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.types import Array

F32, BF16 = torch.float32, torch.bfloat16


class Memory:
    """Gives memory, and notes how much."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def make(self, size_bytes: int) -> Array:
        self.given.append(size_bytes)
        return np.zeros(size_bytes, np.uint8)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def make_pool(memory: Memory, limit_bytes: int) -> tuple[BufferPool, Meter]:
    meter = Meter()
    return BufferPool(limit_bytes, meter, make=memory.make), meter


def test_a_buffer_serves_again_as_much_or_less_in_any_dtype(memory: Memory) -> None:
    pool, meter = make_pool(memory, 800)
    first = pool.take(100, F32)
    assert (first.numel(), first.dtype) == (100, F32)
    pool.give(first)
    for numel, dtype in ((100, F32), (50, F32), (200, BF16), (1, BF16)):
        again = pool.take(numel, dtype)
        assert (again.numel(), again.dtype, again.data_ptr()) == (numel, dtype, first.data_ptr())
        pool.give(again)
    assert memory.given == [400]
    assert meter.current_bytes == meter.peak_bytes == 400


def test_small_requests_between_large_ones_make_nothing_anew(memory: Memory) -> None:
    pool, _ = make_pool(memory, 800)
    for _ in range(5):  # a training step: a small unit, then large ones, two at a time
        small = pool.take(1, F32)
        large = [pool.take(100, F32)]
        pool.give(small)
        for _ in range(6):
            large.append(pool.take(100, F32))
            pool.give(large.pop(0))
        pool.give(large.pop())
    assert sum(memory.given) <= 800 + 4
    assert len(memory.given) <= 3


def test_the_smallest_that_is_large_enough_is_taken(memory: Memory) -> None:
    pool, _ = make_pool(memory, 10_000)
    large, small = pool.take(1000, F32), pool.take(10, F32)
    addresses = large.data_ptr(), small.data_ptr()
    pool.give(large)
    pool.give(small)
    assert pool.take(5, F32).data_ptr() == addresses[1]
    assert pool.take(5, F32).data_ptr() == addresses[0]


def test_idle_buffers_go_where_others_need_the_memory_and_when_trimmed(memory: Memory) -> None:
    pool, meter = make_pool(memory, 1000)
    pool.give(pool.take(100, F32))
    big = pool.take(200, F32)  # 400 idle and 800 out would be too much
    assert meter.current_bytes == 800
    pool.give(big)
    assert meter.current_bytes == 800
    pool.trim()
    assert meter.current_bytes == 0
    assert meter.peak_bytes == 800


def test_more_than_the_limit_is_handed_out_but_not_kept(memory: Memory) -> None:
    pool, meter = make_pool(memory, 400)
    buffers = [pool.take(100, F32) for _ in range(3)]
    assert meter.current_bytes == 1200
    for buffer in buffers:
        pool.give(buffer)
    assert meter.current_bytes == 400


def test_capacity_is_what_no_buffer_takes_however_little_of_it_is_used(memory: Memory) -> None:
    pool, _ = make_pool(memory, 800)
    pool.give(pool.take(100, F32))
    small = pool.take(1, F32)  # in a buffer of 400 bytes
    assert pool.has_capacity(400)
    assert not pool.has_capacity(401)
    pool.give(small)
    assert pool.has_capacity(10_000), "one buffer always fits"


def test_waiting_for_capacity(memory: Memory) -> None:
    pool, _ = make_pool(memory, 400)
    buffer = pool.take(100, F32)
    waiter = threading.Thread(target=pool.wait_for_capacity, args=(4,))
    waiter.start()
    pool.give(buffer)
    waiter.join(10.0)
    assert not waiter.is_alive()


def test_nothing_takes_no_memory(memory: Memory) -> None:
    pool, meter = make_pool(memory, 400)
    empty = pool.take(0, BF16)
    assert (empty.numel(), empty.dtype) == (0, BF16)
    pool.give(empty)
    assert memory.given == []
    assert meter.peak_bytes == 0


def test_without_a_maker_torch_gives_memory() -> None:
    pool = BufferPool(100, Meter())
    assert pool.take(7, BF16).shape == (7,)
