"""Copies past the caches: every byte, at every alignment, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.kernels import stream_copy


@given(
    size=st.integers(0, 1000) | st.sampled_from([63, 64, 65, 4096, 100_003]),
    to=st.integers(0, 130),
    source=st.integers(0, 130),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_bytes_and_no_others(size: int, to: int, source: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, source + size, np.uint8)
    out = np.full(to + size + 200, 7, np.uint8)
    stream_copy.copy(out[to : to + size], data[source:])
    np.testing.assert_array_equal(out[to : to + size], data[source:])
    assert (out[:to] == 7).all()
    assert (out[to + size :] == 7).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint16, np.bool_])
def test_every_element_type(dtype: type[np.generic]) -> None:
    data = np.arange(1000).astype(dtype)
    out = np.zeros(1001, dtype)
    stream_copy.copy(out[1:], data)
    np.testing.assert_array_equal(out[1:], data)


def test_arrays_of_other_lengths_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        stream_copy.copy(np.zeros(3), np.zeros(4))
