"""A transfer over a long line is split over several connections: what they carry is what one would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.rpc.deadlines import Deadline
from axon_ps.shard.client import transfers
from axon_ps.shard.client.transfers import Transfer
from axon_ps.sharding.plan import Slice
from axon_ps.types import DType
from axon_ps.wire.v1 import common_pb2


@given(st.data())
def test_a_split_covers_the_range_once_in_full_chunks(data: Any) -> None:
    chunk = data.draw(st.integers(1, 50))
    begin = data.draw(st.integers(0, 100))
    s = Slice(unit=0, server=0, begin=begin, end=begin + data.draw(st.integers(1, 500)))
    first = data.draw(st.integers(0, s.end - 1))
    last = data.draw(st.integers(max(first, s.begin) + 1, 700))
    array = np.arange(first, last, dtype=np.float32)
    residuals = (array + 0.25, array + 0.5)
    t = Transfer(
        begin=first, end=last, array=array, dtype=DType.F32, chunk_numel=chunk, context=common_pb2.CallContext,
        deadline=Deadline(None), residuals=residuals,
    )  # fmt: skip
    most, least = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 400))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "MIN_SPLIT_BYTES", least)
        split = list(t.split(s, most))
    assert 1 <= len(split) <= most
    if len(split) == 1:
        assert split == [t]
        return
    begin, end = max(first, s.begin), min(last, s.end)
    assert [one.begin for one in split] == [begin, *(one.end for one in split[:-1])]
    assert split[-1].end == end
    assert all((one.begin - s.begin) % chunk == 0 for one in split[1:])
    for one in split:
        there = slice(one.begin - first, one.end - first)
        assert one.array is not None
        assert one.residuals is not None
        assert np.shares_memory(one.array, array)
        assert np.array_equal(one.array, array[there])
        assert [np.array_equal(a, b[there]) for a, b in zip(one.residuals, residuals, strict=True)] == [True, True]
    assert (end - begin) * 4 >= least * len(split)
