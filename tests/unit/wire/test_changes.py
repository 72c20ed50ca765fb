"""The changes between two versions of a chunk: exact, small where few elements changed, and checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.wire.changes import apply_changes, encode_changes


def restored(old: np.ndarray, payload: bytes) -> np.ndarray:
    out = old.copy()
    apply_changes(memoryview(payload), out)
    return out


@given(st.integers(1, 300), st.sets(st.integers(0, 299), max_size=60), st.sampled_from([np.uint16, np.float32]))
def test_what_comes_out_is_what_went_in(numel: int, at: set[int], dtype: type) -> None:
    old = np.arange(numel).astype(dtype)
    new = old.copy()
    new[[i for i in at if i < numel]] += 1
    payload = encode_changes(old, new)
    changed = int((old != new).sum())
    assert (payload is None) == (changed * (2 + old.itemsize) >= old.nbytes)
    if payload is not None:
        assert len(payload) == changed * (2 + old.itemsize)
        np.testing.assert_array_equal(restored(old, payload), new)


def test_far_apart_and_at_both_ends() -> None:
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[[0, 65535, 65536, 299_999]] = 1
    payload = encode_changes(old, new)
    assert payload is not None
    assert len(payload) < 50
    np.testing.assert_array_equal(restored(old, payload), new)
    assert encode_changes(old[:1000], old[:1000]) == b""


def test_bits_count_and_not_values() -> None:
    old = np.array([0.0, np.nan, 1.0, 2.0], np.float32)
    new = np.array([-0.0, np.nan, 1.0, 2.0], np.float32)
    payload = encode_changes(old, new)
    assert payload is not None
    assert len(payload) == 6
    assert np.signbit(restored(old, payload)[0])


@pytest.mark.parametrize(("payload", "message"), [(b"12345", "no whole number"), (b"\xff\xff\x00\x00", "is said to")])
def test_a_payload_of_something_else_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        apply_changes(memoryview(payload), np.zeros(8, np.uint16))
