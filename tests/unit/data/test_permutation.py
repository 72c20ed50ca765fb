"""`Permutation`: it is one, evenly spread, and the same everywhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.data import Permutation, permutation
from axon_ps.errors import InvalidRequest


@pytest.mark.parametrize("short", [0, 1 << 16])
def test_every_number_stands_at_one_position(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "SHORT", short)
    for length in (*range(max(4, min(short, 5)), 40), 1000, 1024, 1025, 70_001):
        order = Permutation(length, seed=3, epoch=length)
        assert np.array_equal(np.sort(order[np.arange(length)]), np.arange(length))
        assert len(order) == length


@settings(max_examples=50)
@given(length=st.integers(1, 1 << 40), seed=st.integers(0, (1 << 64) - 1), epoch=st.integers(0, (1 << 64) - 1))
def test_a_stretch_needs_nothing_of_the_rest(length: int, seed: int, epoch: int) -> None:
    order = Permutation(length, seed, epoch)
    positions = np.unique(np.linspace(0, length - 1, 100).astype(np.int64))
    numbers = order[positions]
    assert ((numbers >= 0) & (numbers < length)).all()
    assert len(np.unique(numbers)) == len(positions)
    assert np.array_equal(order[positions[::-1]], numbers[::-1])


def test_short_orders_are_all_as_likely() -> None:
    counts = Counter(tuple(Permutation(4, 0, epoch)[np.arange(4)].tolist()) for epoch in range(2400))
    assert len(counts) == 24
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 49.7  # chi-square, 23 degrees, p = 0.001


def test_long_orders_are_evenly_spread() -> None:
    length, bins = 100_000, 20
    at = np.arange(length)
    orders = [Permutation(length, 1, epoch)[at] for epoch in range(2)]
    for other in (at, orders[1]):
        table, _, _ = np.histogram2d(orders[0], other, bins=bins)
        expected = length / bins**2
        chi_square = ((table - expected) ** 2 / expected).sum()  # 361 degrees of freedom
        assert 260 < chi_square < 470
    steps = np.diff(orders[0])
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1] + 0.5) < 0.01  # what a random order has
    assert (np.abs(steps) == 1).mean() < 1e-4


SHORT_ORDER = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
LONG_ORDER = [720852001, 558157112, 472943204, 584877375]


def test_an_order_never_changes() -> None:
    assert Permutation(10, 0, 0)[np.arange(10)].tolist() == SHORT_ORDER
    assert Permutation(10**9, 5, 6)[np.arange(4)].tolist() == LONG_ORDER
    assert Permutation(10, 0, 1)[np.arange(10)].tolist() != SHORT_ORDER
    assert Permutation(10, 1, 0)[np.arange(10)].tolist() != SHORT_ORDER


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (1 << 62, 0, 0), (1, -1, 0), (1, 0, 1 << 64)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="it goes from 0 to"):
        Permutation(*numbers)
