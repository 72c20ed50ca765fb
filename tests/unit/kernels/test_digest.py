"""The digest of memory: any bit shows, and ranges add up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from axon_ps.kernels import optimizer_loops
from axon_ps.kernels.digest import READ, SUMMED_NUMEL, digest, digests_of


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


@pytest.mark.parametrize("word", [0xFFFF_FFFF, 0x0000_FFFF, 0xFFFF_0000, 0x0001_0000, 1])
def test_the_sums_of_a_loop_are_exact_over_as_many_elements_as_it_may_have(word: int) -> None:
    param, grad = (np.full(SUMMED_NUMEL, word, np.uint32).view(np.float32) for _ in range(2))
    digests = np.zeros((2, 2), np.uint64)
    optimizer_loops.sgd(param, grad, None, None, digests, 1.0, None, 0.0, 0.0, 1.0, None)
    assert digests[READ].tolist() == [word * SUMMED_NUMEL] * 2
    assert digests[1].tolist() == [*digests_of((param,)), 0]
