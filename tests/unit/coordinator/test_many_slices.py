"""A model of many small units: a step costs the coordinator the same, a placement in proportion, and there is a bound.

Bytecodes are counted, and not time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from axon_ps.coordinator.core import models
from axon_ps.coordinator.core.placement.rebalance import BUDGET_SLICES
from axon_ps.errors import Busy
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import DType, OptimizerSpec
from coordinator_driver import SPEC, Driver, Peer

FEW, MANY = 60, 480
NAME = "tiny"
MUCH_LESS = 0.2
"""A part of what work in proportion would cost; dictionaries of a few entries more are within it."""


def spec_of(units: int) -> JobSpec:
    return JobSpec(layout=Layout(units=tuple(build_unit(f"u{i}", [(f"u{i}", (1,), DType.F32)]) for i in range(units))))


def operations(call: Callable[[], Any]) -> int:
    """The number of bytecodes that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Job:
    """A job that trains a model, and beside it one of so many one-element units, in two copies on three servers."""

    def __init__(self, units: int) -> None:
        self.driver = d = Driver(num_shards=3, replication=2, world_size=1)
        self.servers = [d.shard(node=f"s{i}") for i in range(3)]
        self.worker = d.worker()
        d.register(self.worker, SPEC)
        optimizer = OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=(0,) * units)
        d.register(self.worker, spec_of(units), optimizer, name=NAME)
        for server in self.servers:
            server.initialized(model=0)
            server.initialized(model=1)

    def step(self, model: int) -> None:
        self.worker.vote(model=model)
        for server in self.servers:
            server.ready(model=model)

    def tick(self) -> None:
        self.driver.perform(self.driver.state.tick(self.driver.clock()))

    def status(self) -> None:
        self.driver.state.status(self.driver.clock())

    def copies(self) -> list[tuple[Peer, int]]:
        """The number of slices of the model of many units that each server is to copy."""
        return [(s, len(s.copying(1))) for s in self.servers if s.open and s.copying(1)]


def compared(call: Callable[[Job], Any], before: Callable[[Job], Any] = lambda job: None) -> float:
    """The cost of a call with `MANY` units, in those of one with `FEW`."""
    costs = []
    for units in (FEW, MANY):
        job = Job(units)
        job.step(0)
        job.step(1)
        before(job)
        costs.append(operations(lambda job=job: call(job)))  # type: ignore[misc]
    return costs[1] / costs[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda job: job.step(0),
        lambda job: job.step(1),
        lambda job: job.servers[0].beat(),
        lambda job: job.tick(),
        lambda job: job.status(),
    ],
    ids=["a step of another model", "its own step", "a heartbeat", "a tick", "the status"],
)
def test_what_comes_all_the_time_costs_the_same_however_many_slices_there_are(call: Callable[[Job], Any]) -> None:
    assert compared(call) < 1 + MUCH_LESS * (MANY / FEW - 1)


def lose(job: Job) -> None:
    job.servers[2].lose()


def test_a_lost_server_costs_work_in_proportion_to_slices() -> None:
    assert compared(lose) < 1.3 * MANY / FEW


def test_slices_that_were_copied_together_cost_work_in_proportion_to_slices() -> None:
    def copied(job: Job) -> None:
        server, _ = job.copies()[0]
        server.copied(model=1)

    assert compared(copied, lose) < 1.3 * MANY / FEW


def test_few_slices_are_copied_at_a_time_however_small_they_are() -> None:
    job = Job(2 * BUDGET_SLICES)
    lose(job)
    rounds = []
    while copies := job.copies():
        rounds.append(sum(count for _, count in copies))
        for server, _ in copies:
            server.copied(model=1)
        job.driver.advance(1.0, beat=True)
    assert max(rounds) <= BUDGET_SLICES
    assert sum(rounds) > BUDGET_SLICES
    assert job.driver.state.status(job.driver.clock()).models[1].lacking == 0


def test_a_model_of_too_many_slices_is_refused_and_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_SERVER_SLICES", 20)
    driver = Driver(num_shards=3, replication=2, world_size=1)
    for i in range(3):
        driver.shard(node=f"s{i}")
    worker = driver.worker()
    before = driver.store.load()
    with pytest.raises(
        Busy, match=r"its 31 units are cut into 31 slices; a job with 3 shard servers and 2 copies .* 30"
    ):
        driver.register(worker, spec_of(31), None, name=NAME)
    assert driver.store.load() == before
    assert driver.register(worker, spec_of(30), None, name=NAME).first


def test_slices_of_all_models_count_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_SLICES", 10)
    driver = Driver(num_shards=1, world_size=1)
    driver.shard()
    worker = driver.worker()
    first = driver.register(worker, spec_of(6), None, name="a")
    with pytest.raises(Busy, match="5 slices, beside 6 of other models"):
        driver.register(worker, spec_of(5), None, name="b")
    driver.call(lambda call: driver.state.registrations.release(call, worker.caller, first.model, "a"))
    assert driver.register(worker, spec_of(5), None, name="b").first


def test_a_registration_that_was_prepared_is_the_same() -> None:
    driver = Driver(num_shards=3, replication=2, world_size=1)
    for i in range(3):
        driver.shard(node=f"s{i}")
    worker, spec = driver.worker(), spec_of(FEW)
    driver.state.registrations.preparation(spec)()
    driver.register(worker, spec, None, name="prepared")
    driver.register(worker, spec_of(FEW), None, name="not")
    assert worker.placements[0].holders == worker.placements[1].holders
