"""A bit of a server's memory changes: it is found, named, served to nobody, and the slice is got again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from axon_ps.compress import Int8
from axon_ps.errors import Broken, SliceMoved, StepAborted
from axon_ps.shard.core.digests import GRADIENT, PARAM, Corruption
from axon_ps.shard.core.gradients import Push
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType, OptimizerSpec, Outcome
from engine_driver import Servers, job_of, layout_of, one_group
from test_replicas import LAYOUT, TRAINABLE, Replicated, copy_slices, encoded, job, normals


def flipped(array: Array, element: int, bit: int) -> None:
    array.view(np.uint32)[element] ^= np.uint32(1 << bit)


def made_with_adam(replicas: int = 2) -> Replicated:
    made = Replicated(job(), replicas=replicas, optimizer=one_group(LAYOUT, "adamw", lr=0.1))
    made.step(1)
    made.commit()
    return made


def block_of(owned: OwnedSlice, array: str, element: int) -> Corruption:
    at = next(b for b in owned.chunks.blocks if b.start <= element < b.stop)
    begin = owned.chunks.begin
    return Corruption(array, owned.chunks.unit, begin + at.start, begin + at.stop)


def heal(made: Replicated, rank: int, number: int) -> None:
    """What coordinator and shells do: another holder goes on, and the server gets the slice again."""
    made.set_placement(made.placement.corrupted(number, rank))
    made.begin_generation()
    copy_slices(made, rank)


@pytest.mark.parametrize("seed", range(20))
def test_a_bit_flip_is_found_by_the_next_update_and_named(seed: int) -> None:
    made, unfailed, choice = made_with_adam(), made_with_adam(), random.Random(seed)
    for step in range(2, 12):
        rank = choice.choice((0, 1))
        owned = choice.choice([s for s in made.engines[rank].slices.values() if s.trainable])
        name = choice.choice((PARAM, GRADIENT, *owned.master.state))
        element, bit = choice.randrange(owned.chunks.numel), choice.randrange(32)
        for each in (made, unfailed):
            each.step(step)
        array = owned.accumulators[0].array if name == GRADIENT else owned.master.arrays()[name]
        flipped(array, element, bit)
        for each in (made, unfailed):
            each.commit()
        assert owned.take_corruptions() == [block_of(owned, name, element)]
        assert owned.corrupt
        assert not owned.wire.frames, "it is served no more"
        assert made.engines[rank].gradients.ready() is None
        others = [s for e in made.engines.values() for s in e.slices.values() if s is not owned]
        assert not [s for s in others if s.corruptions or s.corrupt], "nothing else is named"
        heal(made, rank, owned.number)
        assert not owned.corrupt
    for number, owned in made.engines[0].slices.items():
        theirs = unfailed.engines[0].slices[number].master
        assert owned.master.values.tobytes() == theirs.values.tobytes(), "as if nothing had failed"
        assert all(owned.master.state[n].tobytes() == theirs.state[n].tobytes() for n in theirs.state)


def test_nothing_is_found_where_nothing_failed() -> None:
    made = made_with_adam()
    for step in range(2, 300):
        made.step(step, absent=lambda unit, replica, s=step: (unit + replica + s) % 3 == 0)  # type: ignore[misc]
        if step % 7 == 0:
            made.drop(Outcome.ABORT)
        else:
            made.commit()
        if step % 50 == 0:
            made.begin_generation()
    for engine in made.engines.values():
        for owned in engine.slices.values():
            owned.check(0, len(owned.chunks.bounds))
            assert not owned.corruptions


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("grad_dtype", [DType.F32, DType.BF16, DType.U8])
def test_a_sum_that_changes_between_two_replicas_is_not_added_to(
    replicas: int, absent: bool, grad_dtype: DType
) -> None:
    if grad_dtype is DType.U8:
        spec = job(WirePrecision(grad_compression=Int8(16)))
    else:
        spec = job(WirePrecision(grad=grad_dtype))
    made = Replicated(spec, replicas=replicas, optimizer=one_group(LAYOUT, "adamw", lr=0.1))
    made.step(1)
    made.commit()
    made.push(0, 0, normals(141, 5))
    engine, owned = next((made.engines[r], s) for r, s in made.copies(0) if s.primary)
    sums, begin = owned.accumulators[0], owned.chunks.bounds[0][0]
    flipped(sums.array, 3, 30)
    grad = None if absent else encoded(spec, normals(owned.chunks.ranges[0].stop, 6))
    for replica in (1, 1, 0 if replicas == 2 else 2):
        pushed = engine.gradients.push(engine.step, 0, begin, replica, grad_dtype, grad)
        assert pushed is (Push.WAIT if replica else Push.DUPLICATE)
    assert owned.take_corruptions() == [block_of(owned, GRADIENT, 3)]
    assert not owned.corrupt, "its values are as they were"
    assert sums.spoiled
    assert not list(engine.gradients.sums_of(0, owned)), "nothing is forwarded"
    assert sums.summed[0] == 1
    for index, (begin, _) in enumerate(owned.chunks.bounds):
        if replicas == 2 and index:
            assert engine.gradients.push(engine.step, 0, begin, 1, grad_dtype, None) is Push.WAIT
    assert engine.gradients.ready() is None
    made.begin_generation()
    made.step(2)
    made.commit()
    assert not [s for e in made.engines.values() for s in e.slices.values() if s.corruptions]


LARGE = layout_of((200_000, 150_001, 30_000))
"""A unit of one slice whose chunks have several blocks; its second parameter is not trained below."""


def large(name: str, replicas: int = 1, **hyper: float) -> tuple[Servers, OwnedSlice]:
    spec = job_of(LARGE, chunk_numel=1 << 18, param=DType.BF16)
    optimizer = OptimizerSpec(name=name, groups=({"lr": 0.1, **hyper}, {"lr": 0.1}), group_of=(0, -1, 1))
    made = Servers(spec, replicas=replicas, optimizer=optimizer)
    made.upload([normals(380_001, 1)])
    return made, made.engines[0].slices[0]


@pytest.mark.parametrize(
    ("name", "hyper"),
    [("sgd", {}), ("sgd", {"momentum": 0.9}), ("adamw", {"amsgrad": 1.0}), ("rmsprop", {"centered": 1.0})],
)
def test_the_block_that_changed_is_named_in_every_array(name: str, hyper: dict[str, float]) -> None:
    """Also in a parameter that is not trained, and in state that only another group needs."""
    made, owned = large(name, **hyper)
    made.train_step([[normals(380_001, 2)]])
    assert len(owned.chunks.blocks) == 3
    for element in (0, 131_071, 131_072, 250_000, 262_144, 350_000, 350_001, 380_000):
        for array in (PARAM, *owned.master.state, GRADIENT):
            made.push(0, 0, normals(380_001, element))
            changed = owned.accumulators[0].array if array == GRADIENT else owned.master.arrays()[array]
            flipped(changed, element, 7)
            made.commit()
            assert owned.corruptions == [block_of(owned, array, element)]
            owned.master.values[:] = normals(380_001, 1)
            for state in owned.master.state.values():
                state[:] = 0.5
            digests = owned.digests_of_copy(owned.master.arrays())
            owned.copied_from_primary(made.version, made.version, 0, (), digests)
            made.train_step([[normals(380_001, 2)]])
            assert not owned.corruptions


def test_the_block_of_a_sum_that_changed_is_named_with_the_next_replica() -> None:
    made, owned = large("sgd", replicas=2)
    made.push(0, 0, normals(380_001, 3))
    flipped(owned.accumulators[0].array, 140_000, 0)
    flipped(owned.accumulators[0].array, 7, 31)
    engine, grad = made.engines[0], normals(1 << 18, 4)
    assert engine.gradients.push(engine.step, 0, 0, 1, DType.F32, grad) is Push.WAIT
    assert owned.corruptions == [block_of(owned, GRADIENT, 7), block_of(owned, GRADIENT, 140_000)]


def test_a_spoiled_sum_is_not_reported_as_ready() -> None:
    made = made_with_adam(replicas=1)
    made.step(2)
    engine, owned = next((made.engines[r], s) for r, s in made.copies(0) if s.primary)
    flipped(owned.accumulators[0].array, 0, 1)
    assert owned.accumulators[0].check((0,)) == [block_of(owned, GRADIENT, 0)]
    assert engine.gradients.ready() is None


def test_a_sum_that_differs_from_what_was_sent_is_not_taken() -> None:
    made = made_with_adam()
    engine, owned = next((made.engines[r], s) for r, s in made.copies(0) if not s.primary)
    begin, total = owned.chunks.bounds[0][0], normals(owned.chunks.ranges[0].stop, 6)
    right = int(total.view(np.uint32).sum(dtype=np.uint64))
    with pytest.raises(Broken, match=f"the sum of a chunk at element {begin} of unit 0 is not what its primary"):
        engine.gradients.push_sum(engine.step, 0, begin, 0, total, right + 1)
    assert engine.gradients.push_sum(engine.step, 0, begin, 0, total, right) is Push.SUMMED


def test_values_that_changed_are_not_encoded() -> None:
    made = made_with_adam()
    rank, owned = next((r, s) for r, s in made.copies(2) if not s.primary)
    flipped(owned.master.values, 7, 3)
    with pytest.raises(SliceMoved, match="unit 2 from element 24 on are corrupt on this shard server"):
        owned.encode(0, DType.BF16)
    with pytest.raises(SliceMoved):
        made.engines[rank].parameters.frames(2, owned.chunks.begin, owned.chunks.end)
    assert block_of(owned, PARAM, 7) in owned.take_corruptions()
    assert owned.corrupt


@pytest.mark.parametrize("name", [PARAM, "exp_avg", GRADIENT])
def test_an_update_of_what_changed_is_not_prepared(name: str) -> None:
    made = made_with_adam(replicas=1)
    made.step(2)
    engine, owned = next((made.engines[r], s) for r, s in made.copies(0) if s.primary)
    flipped(owned.accumulators[0].array if name == GRADIENT else owned.master.arrays()[name], 1, 4)
    with pytest.raises(StepAborted, match="a chunk of unit 0 is corrupt"):
        engine.expected.prepare_chunk(engine.step, owned, 0, ({"lr": 0.1},), engine.scratch())
    assert owned.take_corruptions() == [block_of(owned, name, 1)]
    assert owned.corrupt == (name != GRADIENT)
    assert engine.gradients.ready() is None


def test_copying_values_that_changed_makes_none() -> None:
    source, target = made_with_adam(), made_with_adam()
    theirs, ours = source.engines[0].slices[0], target.engines[0].slices[0]
    flipped(theirs.master.values, 2, 2)
    ours.begin_copy(2)
    scratch = ours.wire.scratch(len(ours.chunks.bounds))
    ours.change.copy(0, len(ours.chunks.bounds), theirs, 0.5, scratch)
    ours.finish()
    assert ours.corrupt


def test_a_corrupt_slice_that_is_not_being_copied_yet_stays_lost() -> None:
    """A placement that says the server has the slice, since the report is still on its way."""
    made = made_with_adam()
    owned = made.engines[1].slices[0]
    flipped(owned.master.values, 0, 0)
    made.step(2)
    made.commit()
    assert owned.take_corruptions()
    made.set_placement(made.placement.changed({0: made.placement.holders[0].with_primary(1)}))
    assert owned.corrupt
    assert not owned.copying
    assert made.engines[1].gradients.ready() is None
    assert not made.engines[1].parameters.available(owned.chunks.unit, owned.chunks.begin, 0)
    assert made.engines[1].parameters.initialized


def test_units_without_gradient_are_looked_at_when_asked() -> None:
    made = made_with_adam()
    owned = next(s for _, s in made.copies(2))
    assert TRAINABLE == (0, 1)
    flipped(owned.master.values, 11, 12)
    owned.check(0, len(owned.chunks.bounds))
    assert owned.take_corruptions() == [block_of(owned, PARAM, 11)]
