"""Values arrive chunk by chunk, and none is served before all are there."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.shard.core.arriving_values import ArrivingValues
from axon_ps.shard.core.chunks import Chunks
from axon_ps.sharding.plan import Slice


def test_values_lack_until_the_end_whatever_the_order_and_however_often_a_chunk_comes() -> None:
    arriving, out = ArrivingValues(Chunks(Slice(unit=0, server=0, begin=0, end=10), 4)), np.zeros(10, np.float32)
    for index, numel, lacking in ((2, 2, 2), (2, 2, 2), (0, 4, 1), (1, 4, 1)):
        assert not arriving.complete
        arriving.store(index, np.full(numel, index + 1, np.float32), out)
        assert arriving.lacking == lacking, "one is left until they are served"
    assert arriving.complete
    np.testing.assert_array_equal(out, np.repeat([1.0, 2.0, 3.0], [4, 4, 2]))
    arriving.end()
    assert arriving.lacking == 0
    arriving.begin()
    assert arriving.lacking == 3
    assert not arriving.complete


def test_values_of_another_length_are_refused() -> None:
    arriving = ArrivingValues(Chunks(Slice(unit=7, server=0, begin=100, end=110), 4))
    with pytest.raises(InvalidRequest, match="first values at element 104 of unit 7 have 3 elements; they must have 4"):
        arriving.store(1, np.zeros(3, np.float32), np.zeros(10, np.float32))
    assert arriving.lacking == 3
