"""The states of a flat unit: every allowed change of state happens here, every other is an error; and the sources."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Broken, InternalError, StepAborted
from axon_ps.parallel.fsdp.flat_unit import _TRANSITIONS, FlatUnit, UnitState
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.sources import HostCopySource, MappedSource, ParameterSource, RemoteSource, _window
from axon_ps.parallel.fsdp.strategy import CPUOffload, ShardingStrategy
from axon_ps.parallel.fsdp.wrap import WrappedUnit, Wrapping
from axon_ps.parallel.precision import MixedPrecision
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import Array, DType
from parallel_fakes import FakeSteps, FakeWork

NUMEL = 4
NBYTES = 4 * NUMEL
HYPER = ({"lr": 1.0},)


class Recorded(FlatUnit):
    """A flat unit that notes its changes of state."""

    changes: set[tuple[UnitState, UnitState]]

    def _enter(self, state: UnitState, *args: Any) -> None:
        before = self.state
        super()._enter(state, *args)
        self.changes.add((before, state))


class Shared:
    """Memory of a server, mapped."""

    def __init__(self, values: Array) -> None:
        self.values = values.copy()
        self.version = 0
        self.discarded = 0

    def is_at(self, version: int) -> bool:
        return version == self.version

    def discard_writes(self) -> None:
        self.discarded += 1


class Job:
    """A unit of the values 0 to 3, of a gradient of ones."""

    def __init__(
        self,
        source: Callable[[FakeSteps, BufferPool], ParameterSource] | None = None,
        *,
        resident: bool = False,
        buffered: bool = False,
    ) -> None:
        self.steps = FakeSteps()
        self.steps.values[0] = torch.arange(float(NUMEL))
        self.steps.grads[0] = torch.ones(NUMEL)
        unit = build_unit("u", [("p", (NUMEL,), DType.F32)])
        wrapping = Wrapping(
            group=ProcessGroup.mock(),
            strategy=ShardingStrategy.FULL_SHARD,
            offload=CPUOffload.NONE,
            precision=MixedPrecision(),
            spec=JobSpec(layout=Layout(units=(unit,))),
            name="",
            device=torch.device("cpu"),
            built=torch.float32,
            node_size=1,
            prefetch=True,
        )
        self.meter, self.counters = wrapping.meter, wrapping.counters
        self.pool = BufferPool(2 * NBYTES, self.meter)
        remote = RemoteSource(self.steps, self.pool, buffered=buffered)
        self.flat = Recorded(
            WrappedUnit(owner="", unit=unit, params=(nn.Parameter(torch.zeros(NUMEL)),)),
            remote if source is None else source(self.steps, self.pool),
            wrapping,
            resident=resident,
        )
        self.flat.changes = set()

    def start_speculative(self) -> None:
        assert self.flat.may_speculate
        self.flat.start_speculative(self.steps.ticket(), HYPER)

    def commit(self) -> None:
        """The step is decided as expected."""
        self.steps.values[0] -= 1.0
        self.steps.version += 1
        self.flat.commit_speculative()

    def restore(self) -> None:
        """The parameters are replaced from outside."""
        self.steps.epoch += 1
        self.steps.values[0] = torch.arange(float(NUMEL)) + 10.0

    def unsharded(self) -> list[float]:
        """The values after `unshard`."""
        self.flat.start_gather()
        self.flat.unshard()
        assert self.flat.state is UnitState.UNSHARDED
        return [float(v) for v in self.flat.params[0].detach()]

    def reset(self) -> None:
        """Reshard and free everything, and find that nothing is left."""
        self.flat.discard_speculative()
        self.flat.reshard()
        self.flat.free_storage()
        self.pool.trim()
        assert self.flat.state is UnitState.SHARDED
        assert self.meter.current_bytes == 0
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.isnan(self.flat.params[0]).all()


def sharded() -> Job:
    return Job()


def gathering() -> Job:
    job = Job()
    job.flat.start_gather()
    return job


def speculative() -> Job:
    job = Job()
    job.start_speculative()
    return job


def unsharded(*, resident: bool = True, buffered: bool = True) -> Job:
    job = Job(resident=resident, buffered=buffered)
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    return job


def unsharded_gathering() -> Job:
    job = unsharded()
    job.flat.reshard()
    job.restore()
    job.flat.start_gather()
    return job


def unsharded_speculative() -> Job:
    job = unsharded()
    job.flat.reshard()
    job.start_speculative()
    return job


IN = {
    UnitState.SHARDED: sharded,
    UnitState.GATHERING: gathering,
    UnitState.SPECULATIVE: speculative,
    UnitState.UNSHARDED: unsharded,
    UnitState.UNSHARDED_GATHERING: unsharded_gathering,
    UnitState.UNSHARDED_SPECULATIVE: unsharded_speculative,
}


def scenarios() -> Iterator[Job]:
    """Everything that happens to a unit."""
    job = gathering()
    job.flat.reshard()
    assert job.flat.state is UnitState.SHARDED
    yield job

    job = speculative()
    job.flat.reshard()  # the memory is on its way to be filled
    assert job.flat.state is UnitState.SPECULATIVE
    job.flat.discard_speculative()
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    yield job

    job = speculative()
    job.commit()
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]
    assert job.steps.units("gather") == []
    yield job

    job = speculative()
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]  # used once more before the decision
    yield job

    job = unsharded(buffered=False)
    assert not job.flat.may_speculate  # it is in use
    job.flat.reshard()
    job.start_speculative()  # over values that nothing reads any more
    assert job.flat.state is UnitState.SPECULATIVE
    job.commit()
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]
    assert job.steps.units("gather") == [0]
    yield job

    job = unsharded(buffered=False)
    job.flat.reshard()
    job.start_speculative()
    job.flat.discard_speculative()
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]  # gathered once more
    yield job

    job = unsharded(resident=False, buffered=False)
    job.restore()
    job.flat.start_gather()  # over values that nobody needs any more
    assert job.flat.state is UnitState.GATHERING
    assert job.unsharded() == [10.0, 11.0, 12.0, 13.0]
    yield job

    job = unsharded_gathering()
    job.flat.reshard()
    assert job.flat.state is UnitState.UNSHARDED
    assert job.unsharded() == [10.0, 11.0, 12.0, 13.0]
    yield job

    job = unsharded_speculative()
    job.flat.discard_speculative()
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    yield job

    job = unsharded_speculative()
    job.commit()
    assert job.flat.state is UnitState.UNSHARDED_GATHERING
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]
    yield job

    job = unsharded_speculative()
    job.restore()  # the step cannot commit any more
    assert job.unsharded() == [10.0, 11.0, 12.0, 13.0]
    job.commit()  # nothing is left to commit
    assert job.flat.state is UnitState.UNSHARDED
    yield job


def test_every_allowed_change_of_state_happens_and_leaves_nothing_behind() -> None:
    seen: set[tuple[UnitState, UnitState]] = set()
    for job in scenarios():
        job.reset()
        seen |= job.flat.changes
    assert seen == {(before, after) for before, allowed in _TRANSITIONS.items() for after in allowed}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(UnitState, UnitState)))
def test_every_other_change_of_state_is_an_error(before: UnitState, after: UnitState) -> None:
    job = IN[before]()
    assert job.flat.state is before
    if after in _TRANSITIONS[before]:
        return
    with pytest.raises(InternalError, match=f"'u' cannot go from {before.name} to {after.name}"):
        job.flat._enter(after)
    assert job.flat.state is before
    job.reset()


def test_current_values_are_not_gathered_again_and_never_overwritten_by_those_of_an_undecided_step() -> None:
    job = unsharded(resident=False)
    job.flat.start_gather()
    assert job.flat.state is UnitState.UNSHARDED
    assert not job.flat.may_speculate  # there is no memory but that of the current values
    assert job.steps.units("gather") == [0]
    assert (job.counters.gathers, job.counters.gathered_bytes) == (1, NBYTES)


def test_memory_is_counted_in_every_state() -> None:
    bytes_in = {state: make().flat.reshardable_bytes for state, make in IN.items()}
    assert bytes_in == {
        UnitState.SHARDED: 0,
        UnitState.GATHERING: NBYTES,  # into `flat`
        UnitState.SPECULATIVE: NBYTES,
        UnitState.UNSHARDED: 0,  # these are resident
        UnitState.UNSHARDED_GATHERING: NBYTES,  # of the buffer
        UnitState.UNSHARDED_SPECULATIVE: 0,
    }
    assert unsharded(resident=False).flat.reshardable_bytes == NBYTES


@pytest.mark.parametrize("resident", [False, True])
def test_a_gather_that_fails_leaves_the_unit_as_it_was(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(resident=resident)

    def fail() -> None:
        raise Broken("the server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(job.steps, "gather", lambda *_: FakeWork(fail))
        with pytest.raises(Broken):
            job.unsharded()
    assert job.flat.state is UnitState.SHARDED
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    job.reset()


@pytest.mark.parametrize("begun", ["speculative", "before a restore"])
def test_a_gather_of_what_did_not_come_about_is_begun_again(begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()

    def fail() -> None:
        if begun == "before a restore":
            job.restore()
            monkeypatch.undo()
        raise StepAborted("no such version")

    monkeypatch.setattr(job.steps, "gather", lambda *_: FakeWork(fail))
    if begun == "speculative":
        monkeypatch.undo()
        monkeypatch.setattr(job.steps, "gather_speculative", lambda *_: FakeWork(fail))
        job.start_speculative()
        job.commit()
    expected = [-1.0, 0.0, 1.0, 2.0] if begun == "speculative" else [10.0, 11.0, 12.0, 13.0]
    assert job.unsharded() == expected
    assert (job.flat.repeated, job.counters.gathers) == (1, 1)
    job.reset()


def mapping(job: list[Shared | None]) -> Callable[[FakeSteps, BufferPool], ParameterSource]:
    """A source that maps what is first in the list, if that is current."""

    def make(steps: FakeSteps, pool: BufferPool) -> ParameterSource:
        def found() -> Shared | None:
            return job[0]

        steps.map = lambda unit, dtype: FakeWork(found)  # type: ignore[method-assign]
        return MappedSource(steps, RemoteSource(steps, pool, buffered=False))

    return make


def test_a_mapped_unit_that_is_resident_is_mapped_anew_once_it_has_moved() -> None:
    first, second = (Shared(np.arange(float(NUMEL), dtype=np.float32)) for _ in range(2))
    server: list[Shared | None] = [first]
    job = Job(mapping(server), resident=True)
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    job.flat.reshard()
    job.flat.renew()
    assert job.flat.is_current
    first.version = -1  # its server gives it up
    server[0] = second
    job.flat.renew()
    assert not job.flat.is_current
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    assert job.flat.flat.data_ptr() == second.values.ctypes.data
    assert not job.flat.source.torn(job.flat)


def test_a_mapped_unit_is_the_servers_memory_until_there_is_none() -> None:
    first, second = (Shared(np.arange(float(NUMEL), dtype=np.float32) + shift) for shift in (0.0, 5.0))
    server: list[Shared | None] = [first]
    job = Job(mapping(server))
    job.flat.start_gather()
    assert job.flat.reshardable_bytes == NBYTES
    assert not job.flat.may_speculate
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    assert job.flat.flat.data_ptr() == first.values.ctypes.data
    assert not job.flat.source.torn(job.flat)
    first.version = 1  # the job goes on without this worker
    assert job.flat.source.torn(job.flat)
    job.flat.reshard()
    assert (first.discarded, job.meter.current_bytes) == (1, 0)
    server[0] = second
    assert job.unsharded() == [5.0, 6.0, 7.0, 8.0]
    job.restore()
    server[0] = None
    assert job.unsharded() == [10.0, 11.0, 12.0, 13.0]  # gathered
    assert second.discarded == 1
    assert isinstance(job.flat.source, RemoteSource)
    assert job.flat.repeated == 0
    assert job.counters.gathers == 3
    job.reset()


def test_a_host_copy_is_gathered_once_for_each_version() -> None:
    values = torch.empty(NUMEL)
    job = Job(lambda steps, _: HostCopySource(steps, values))
    assert job.flat.gather_bytes == NBYTES
    for _ in range(2):
        assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
        job.flat.reshard()
    assert (job.flat.gather_bytes, job.counters.gathers, job.counters.host_gathers) == (0, 1, 1)
    job.restore()
    assert job.unsharded() == [10.0, 11.0, 12.0, 13.0]
    assert (job.counters.gathers, job.counters.host_gathers) == (2, 1)
    job.reset()


def test_host_memory_takes_what_an_undecided_step_will_make_of_a_unit() -> None:
    job = Job(lambda steps, _: HostCopySource(steps, torch.empty(NUMEL)))
    assert job.unsharded() == [0.0, 1.0, 2.0, 3.0]
    assert not job.flat.may_speculate  # it is in use
    job.flat.reshard()
    job.start_speculative()
    assert job.meter.current_bytes == 0
    job.commit()
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]
    assert job.steps.units("gather") == [0]
    job.flat.reshard()
    job.start_speculative()
    job.flat.discard_speculative()
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]  # gathered once more
    assert job.steps.units("gather") == [0, 0]
    job.flat.reshard()
    job.start_speculative()
    assert job.unsharded() == [-1.0, 0.0, 1.0, 2.0]  # used once more before the decision
    job.reset()


def test_memory_that_a_gather_writes_to_outlives_its_model() -> None:
    flat = torch.zeros(NUMEL)
    alive, out = weakref.ref(flat), _window(flat, DType.F32)[1:]
    del flat
    assert alive() is not None
    out[:] = 1.0
    del out
    gc.collect()
    assert alive() is None
