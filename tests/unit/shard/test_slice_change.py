"""A change of a slice: every chunk once, in any order, with or without a wire copy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from axon_ps.shard.core.digests import PARAM, Corruption
from axon_ps.shard.core.slice_change import SliceChange
from axon_ps.shard.core.slices import OwnedSlice
from engine_driver import Servers, commit_of, job_of, layout_of, one_group

LAYOUT = layout_of([200])
SPEC = job_of(LAYOUT)


def slice_of(value: float) -> tuple[Servers, OwnedSlice]:
    made = Servers(SPEC, optimizer=one_group(LAYOUT, lr=1.0))
    made.upload([np.full(200, value, np.float32)])
    return made, made.engines[0].slices[0]


def test_an_update_changes_each_chunk_once_in_any_order() -> None:
    made, owned = slice_of(5.0)
    made.push(0, 0, np.arange(200, dtype=np.float32))
    (engine,) = made.engines
    assert engine.decide(commit_of(engine)) == [owned]
    change = owned.change
    assert change is not None
    assert not owned.accepts(0)
    before = owned.wire.frames
    for index in (3, 0, 2, 1):
        change.apply(index, index + 1, engine.scratch())
    assert owned.wire.frames is before, "nothing new is served before all of it is"
    owned.finish()
    assert owned.change is None
    assert (owned.reached, owned.changed, owned.master.updates) == (1, 1, 1)
    np.testing.assert_array_equal(owned.master.values, 5.0 - np.arange(200))


@pytest.mark.parametrize("corrupt", [False, True])
def test_a_copy_averages_with_another_model_and_tells_what_is_lost_there(corrupt: bool) -> None:
    _, owned = slice_of(4.0)
    _, other = slice_of(8.0)
    change = SliceChange(owned.chunks, owned.master, None, owned.accumulators[0], None, 1)
    source = SimpleNamespace(master=other.master, corrupt=corrupt)
    change.copy(1, 3, source, 0.25, np.zeros(0, np.float32))
    change.end()
    np.testing.assert_array_equal(owned.master.values, np.repeat([4.0, 5.0, 4.0], [64, 128, 8]))
    assert owned.master.updates == 0
    assert change.corruptions == ([Corruption(PARAM, 0, 64, 192)] if corrupt else [])


def test_a_backup_makes_no_wire_copy() -> None:
    made, owned = slice_of(1.0)
    owned.primary = False
    made.engines[0].counters.clear()
    assert owned.begin_copy(1) == 0
    change = owned.change
    assert change is not None
    change.copy(0, 4, owned, 1.0, np.zeros(0, np.float32))
    owned.finish()
    assert owned.lacks_frames
    assert owned.copied == 1
