"""The digest of memory: any bit shows, and ranges add up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from axon_ps.kernels.digest import digest


def test_any_bit_shows_and_ranges_add_up() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 777, np.uint32)
    whole = digest(words, 0, words.size)
    assert whole == int(words.sum(dtype=np.uint64))
    cuts = [0, 1, 16, 300, 511, 777]
    assert sum(digest(words, a, b) for a, b in pairwise(cuts)) == whole
    for at in (0, 5, 776):
        for bit in range(32):
            other = words.copy()
            other[at] ^= np.uint32(1 << bit)
            assert digest(other, 0, other.size) - whole in (1 << bit, -(1 << bit))


@pytest.mark.parametrize("values", [np.full(9, 1.5, np.float32), np.zeros(9, np.float32)])
def test_a_constant_is_known_without_reading(values: np.ndarray) -> None:
    words = values.view(np.uint32)
    assert digest(words, 2, 7) == 5 * int(words[0])
