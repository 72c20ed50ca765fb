"""Shared arrays: found by address, freed with the last view, revoked from other processes, detached."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from axon_ps.errors import Busy
from axon_ps.host import shared_memory
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import SharedArray, SharedArrays
from axon_ps.host.shared_memory import Access
from axon_ps.types import Array, DType


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def elsewhere(shared: SharedArray) -> Array:
    """i32[...]: as another process has mapped it."""
    return shared_memory.receive(os.dup(shared.segment.fd), Access.WRITE).view(np.int32)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_an_array_has_the_shape_and_type_asked_for(shape: tuple[int, ...]) -> None:
    array = SharedArrays().empty(shape, DType.BF16)
    assert array.shape == shape
    assert array.dtype == np.uint16
    assert not array.any()


def test_any_range_of_it_is_found_and_nothing_else() -> None:
    shared = SharedArrays()
    assert shared.find(4096, 4) is None
    arrays = [shared.empty((1024,), DType.F32) for _ in range(5)]
    for array in arrays:
        found = shared.find(address(array[10:]), 4000)
        assert found is not None
        assert found.base == address(array)
    assert shared.find(address(arrays[0]), 4097) is None
    assert shared.find(address(np.zeros(4)), 32) is None


def test_it_is_freed_with_its_last_view() -> None:
    shared = SharedArrays()
    array = shared.empty((4, 4), DType.I64)
    found = shared.find(address(array), 8)
    assert found is not None
    fd = found.segment.fd
    view = array.reshape(-1)[3:]
    del array
    gc.collect()
    assert shared.find(found.base, 8) is found
    del view
    gc.collect()
    assert shared.find(found.base, 8) is None
    assert found.segment.fd == -1
    with pytest.raises(OSError):
        os.fstat(fd)


def test_revoked_memory_cannot_be_written_by_processes_that_had_mapped_it() -> None:
    shared = SharedArrays()
    array = shared.empty((100,), DType.I32)
    array[:] = 4
    found = shared.find(address(array), 400)
    assert found is not None
    old, other = found.segment, elsewhere(found)
    shared.revoke(address(array), 400)
    other[:] = 9
    assert (array == 4).all()
    assert old.fd == -1
    assert shared.find(address(array), 400) is found
    assert (elsewhere(found)[:100] == 4).all()
    shared.revoke(address(np.zeros(3)), 12)  # not registered: nothing to do


def test_a_detached_array_is_ordinary_memory_with_its_values() -> None:
    shared = SharedArrays()
    array = shared.empty((100,), DType.I32)
    array[:] = 4
    found = shared.find(address(array), 400)
    assert found is not None
    other = elsewhere(found)[:100]
    shared.detach(address(array) + 40)
    assert shared.find(address(array), 4) is None
    assert found.segment.fd == -1
    array[:50] = 5
    assert (array[50:] == 4).all()
    assert (other == 4).all()
    shared.detach(address(array))  # harmless when repeated
    del array
    gc.collect()


def test_other_memory_is_in_no_buffer() -> None:
    shared = SharedArrays()
    buffer, other = shared.buffer(10_000), np.zeros(10_000, np.uint8)
    assert (buffer.shape, buffer.dtype) == ((10_000,), np.uint8)
    assert shared.find(address_of(other), 10_000) is None
    assert shared.find(address_of(buffer) + 10_000, 10_000) is None
    shared.detach(address_of(other))
    assert shared.find(address_of(buffer), 10_000) is not None


def test_without_shared_memory_a_buffer_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size_bytes: int) -> object:
        raise Busy(f"a shared-memory segment needs {size_bytes} bytes")

    monkeypatch.setattr(shared_memory, "create", full)
    shared = SharedArrays()
    buffer = shared.buffer(1000)
    assert buffer.shape == (1000,)
    assert shared.find(address_of(buffer), 1000) is None


def test_too_much_is_refused_with_the_numbers() -> None:
    with pytest.raises(Busy, match="needs .* bytes"):
        SharedArrays().empty((1 << 50,), DType.F32)
