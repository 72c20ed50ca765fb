"""The workers of a node as threads: what they hold, what they push, and that they must do the same.

Tests of `parallel/fsdp/hybrid/calls.py`, `parallel/fsdp/hybrid/gradients.py`, `parallel/fsdp/hybrid/parameters.py`,
`parallel/fsdp/hybrid/ticket.py` and `parallel/fsdp/hybrid/view.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import AxonError, Broken, Disagreement, MemberLost, Timeout
from axon_ps.parallel.fsdp.hybrid.node import NodeSteps
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.work import QueuedWork
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.partitions import even_options, partition_bounds
from axon_ps.sharding.plan import PlanOptions, make_plan
from axon_ps.types import Array, DType, Grouping, Outcome
from axon_ps_lab.device import stand_in
from parallel_fakes import FakeSteps, FakeWork

UNITS = (1000, 70, 3)
LAYOUT = Layout(
    units=tuple(build_unit(f"u{i}", [(f"p{i}", (n,), DType.F32)], trainable=i != 1) for i, n in enumerate(UNITS))
)
SPEC = JobSpec(layout=LAYOUT, options=PlanOptions(chunk_numel=64, min_slice_numel=64), grouping=Grouping(by_node=True))


class ShardSteps(FakeSteps):
    """`FakeSteps` that serve and take ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {i: torch.arange(n, dtype=torch.float32) for i, n in enumerate(UNITS)}
        self.pushed: dict[tuple[int, int], Array | None] = {}
        self.near: set[tuple[int, int]] = set()  # (unit, begin)
        self.timeout_s = 10.0

    def gather(self, unit: int, out: Array, *, exact: bool = False, begin: int = 0, end: int | None = None) -> FakeWork:
        self.log.append(("gather", unit))
        return FakeWork(lambda: np.copyto(out, self.values[unit][begin:end].numpy()))

    def is_near(self, unit: int, begin: int = 0, end: int | None = None) -> bool:
        return (unit, begin) in self.near

    def gather_speculative(
        self, unit: int, out: Array, ticket: Any, hyper: Any, *, begin: int = 0, end: int | None = None
    ) -> FakeWork:
        self.log.append(("speculative", unit))
        return FakeWork(lambda: np.copyto(out, self.values[unit][begin:end].numpy()))

    def push(
        self, unit: int, grad: Array | None, ticket: Any, done: Any = None, *, begin: int = 0, end: Any = None
    ) -> Any:
        self.pushed[unit, begin] = None if grad is None else grad.copy()
        if done is not None:
            done()
        return FakeWork(lambda: None)


@dataclass
class MockGroups:
    """Groups that are never made again."""

    data: Any
    control: Any

    def form(self, error: AxonError | None = None) -> None:
        raise AssertionError(f"no worker was lost: {error}")


def node(do: Callable[[NodeSteps, ShardSteps, int], Any], size: int = 3) -> list[Any]:
    """`do` on every worker of a node; results, or what was raised."""
    results: list[Any] = [None] * size

    def run(rank: int, data: Any, control: Any) -> None:
        steps = ShardSteps()
        mine = NodeSteps(
            steps,  # type: ignore[arg-type]
            MockGroups(data, control),
            SPEC,
            [DType.F32] * len(SPEC.layout.units),
            2,
            meter=Meter(),
        )
        try:
            results[rank] = do(mine, steps, rank)
        except Exception as error:
            results[rank] = error
        finally:
            mine.close()

    groups = zip(ProcessGroup.mock(size), ProcessGroup.mock(size), strict=True)
    threads = [threading.Thread(target=run, args=(rank, *pair)) for rank, pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_unit_is_gathered_from_shards_and_a_gradient_pushed_in_shards() -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        mine.agree()
        gathered = []
        for unit, numel in enumerate(UNITS):
            out = np.empty(numel, np.float32)
            mine.parameters.gather(unit, out).wait()
            gathered.append(out)
        ticket = mine.ticket()
        pushes = []
        for unit in (2, 0):
            grad = np.full(UNITS[unit], rank + 1.0, np.float32)
            pushes.append(mine.gradients.push(unit, grad, ticket))
        for push in pushes:
            push.wait()
        return (
            gathered,
            steps.pushed,
            ticket.num_replicas,
            [mine.parameters.shards[unit].values.numel() for unit in range(3)],
        )

    results = node(do)
    for gathered, _, replicas, _ in results:
        assert all(np.array_equal(out, np.arange(n)) for out, n in zip(gathered, UNITS, strict=True))
        assert replicas == 3  # the averages of the node's workers are summed
    for unit in (2, 0):
        shards = {begin: grad for _, pushed, _, _ in results for (u, begin), grad in pushed.items() if u == unit}
        full = np.concatenate([shards[begin] for begin in sorted(shards)])
        assert np.array_equal(full, np.full(UNITS[unit], 6.0))
    assert [sum(r[3][unit] for r in results) for unit in range(3)] == list(UNITS)
    assert max(r[3][0] for r in results) - min(r[3][0] for r in results) <= 2 * 64


def test_frozen_units_are_pulled_once_and_others_when_the_version_moves() -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        for version in (0, 1):
            steps.version = version
            mine.agree()
            for unit, numel in enumerate(UNITS):
                mine.parameters.gather(unit, np.empty(numel, np.float32)).wait()
        return [unit for _, unit in steps.log]

    pulled = [unit for result in node(do) for unit in result]
    assert pulled.count(0) == 2 * 3
    assert pulled.count(1) in (1, 2)  # as many as have a shard of it


def test_the_newest_version_that_any_of_them_knows_counts() -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        steps.epoch, steps.version = (1, 2) if rank == 1 else (0, 7)
        mine.agree()
        return mine.view.epoch, mine.view.version

    assert node(do) == [(1, 2)] * 3


def test_workers_that_used_other_units_do_not_vote() -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        for unit in (0, 1) if rank else (1, 0):
            mine.gradients.push(unit, None, mine.ticket()).wait()
        mine.vote(mine.ticket(), [], max_norm=0.0, hyper=())

    results = node(do, 2)
    assert all(isinstance(r, Disagreement) for r in results)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_cover_a_unit_and_cut_it_where_chunks_begin(count: int) -> None:
    for servers in (1, 2, 3):
        plan = make_plan(LAYOUT, servers, SPEC.options)
        for slices in plan.slices:
            bounds = partition_bounds(slices, 64, count)
            cuts = {begin for s in slices for begin, _ in s.chunks(64)} | {slices[-1].end}
            assert bounds[0] == 0
            assert bounds[-1] == slices[-1].end
            assert list(bounds) == sorted(bounds)
            assert set(bounds) <= cuts
            longest = max(b - a for a, b in itertools.pairwise(bounds))
            assert longest <= slices[-1].end / count + 64


def test_even_options_let_the_largest_unit_be_shared_evenly() -> None:
    layout = Layout(units=(build_unit("u", [("p", (1_771_008,), DType.F32)]),))
    for servers, count in ((2, 2), (2, 4), (3, 2), (1, 8)):
        options = even_options(layout, servers, count, PlanOptions())
        bounds = partition_bounds(make_plan(layout, servers, options).slices[0], options.chunk_numel, count)
        shards = [b - a for a, b in itertools.pairwise(bounds)]
        assert options.chunk_numel <= PlanOptions().chunk_numel * 9 // 8
        assert max(shards) <= 1.02 * layout.numel / count, (servers, count, shards)


@pytest.mark.parametrize("numel", [2_099_200, 1_771_008, 3_000_000, 1 << 20, 200_000, 10_000, 1])
@pytest.mark.parametrize("servers", [1, 4])
def test_even_options_leave_no_short_chunk_at_the_end_of_a_slice(numel: int, servers: int) -> None:
    layout = Layout(units=(build_unit("u", [("p", (numel,), DType.F32)]),))
    options = even_options(layout, servers, 1, PlanOptions())
    for owned in make_plan(layout, servers, options).slices[0]:
        chunks = [end - begin for begin, end in owned.chunks(options.chunk_numel)]
        assert max(chunks) <= PlanOptions().chunk_numel * 9 // 8
        assert len(chunks) <= -(-owned.numel // PlanOptions().chunk_numel)
        if len(chunks) > 1:
            assert min(chunks) >= 0.9 * max(chunks), (numel, servers, chunks)


@pytest.mark.parametrize("surprise", [None, "clipped", "skipped", "other hyperparameters"])
def test_shards_are_pulled_speculatively_behind_their_push_and_count_if_decided_so(surprise: str | None) -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        def values_of(unit: int) -> Array:
            out = np.empty(UNITS[unit], np.float32)
            mine.parameters.gather(unit, out).wait()
            return out

        mine.agree()
        before = [values_of(unit) for unit in range(3)]
        ticket = mine.ticket()
        mine.expect(({"lr": 1.0},))
        pushes = [mine.gradients.push(unit, np.ones(UNITS[unit], np.float32), ticket) for unit in (2, 0)]
        for push in pushes:
            push.wait()
        again = values_of(0)  # used once more after its push
        steps.outcome = Outcome.SKIP if surprise == "skipped" else Outcome.COMMIT
        steps.clip_factor = 0.5 if surprise == "clipped" else 1.0
        steps.log.clear()
        steps.values = {unit: value + 1.0 for unit, value in steps.values.items()}  # what the step makes of them
        mine.vote(ticket, [], max_norm=0.0, hyper=({"lr": 2.0 if surprise == "other hyperparameters" else 1.0},))
        return (
            before,
            again,
            [values_of(unit) for unit in (0, 2)],
            [unit for kind, unit in steps.log if kind == "gather"],
        )

    results = node(do)
    for before, again, after, _ in results:
        assert np.array_equal(again, before[0])
        if surprise != "skipped":  # else nothing was pulled, or the old values again, which this fake no longer has
            assert np.array_equal(after[0], before[0] + 1.0)
            assert np.array_equal(after[1], before[2] + 1.0)
    pulled = [unit for *_, log in results for unit in log]
    if surprise is None:
        assert pulled.count(2) == 0  # pulled speculatively; so was unit 0, but again for its second use
        assert pulled.count(0) == 3
    elif surprise != "skipped":
        assert (pulled.count(0), pulled.count(2) > 0) == (3, True)


def test_a_shard_on_a_server_of_this_host_is_pulled_once_the_step_has_committed() -> None:
    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        mine.agree()
        steps.near = {(0, 0)}  # the first worker's shard; those of others are on other hosts
        ticket = mine.ticket()
        mine.expect(({"lr": 1.0},))
        mine.gradients.push(0, np.ones(UNITS[0], np.float32), ticket).wait()
        early = steps.units("speculative")
        mine.vote(ticket, [], max_norm=0.0, hyper=({"lr": 1.0},))
        return early, steps.units("gather").count(0)

    assert node(do) == [([], 1), ([0], 0), ([0], 0)]


@dataclass
class TwoGroups(MockGroups):
    """Groups that are made again once."""

    others: tuple[Any, Any] = ()  # type: ignore[assignment]

    def form(self, error: AxonError | None = None) -> None:
        assert isinstance(error, MemberLost)
        self.data, self.control = self.others


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("when", ["agree", "gather", "push", "vote"])
def test_a_step_in_which_a_worker_of_the_node_is_lost_aborts_and_the_next_has_new_groups(
    when: str, on_device: bool
) -> None:
    groups_of = [ProcessGroup.mock(2) for _ in range(4)]
    loss = MemberLost("rank 1 (node a) has left the job")
    arrived = threading.Barrier(2)

    def step(mine: NodeSteps, steps: ShardSteps, groups: TwoGroups, moment: str = "") -> tuple[Any, Outcome]:
        def at(this: str) -> None:
            if this == moment:
                arrived.wait()
                groups.data.abort(loss)
                groups.control.abort(loss)

        at("agree")
        mine.agree()
        at("gather")
        gathered = []
        for unit, numel in enumerate(UNITS):
            out = torch.empty(numel)
            mine.parameters.gather(unit, out if on_device else out.numpy()).wait()
            gathered.append(out.numpy())
        ticket = mine.ticket()
        at("push")
        grads = {unit: torch.ones(UNITS[unit]) for unit in (2, 0)}
        pushes = [
            mine.gradients.push(unit, grad if on_device else grad.numpy(), ticket) for unit, grad in grads.items()
        ]
        for work in pushes:
            work.wait()
        at("vote")
        return gathered, mine.vote(ticket, pushes, max_norm=0.0, hyper=()).outcome

    def run(rank: int) -> None:
        steps = ShardSteps()
        pairs = [(groups_of[i][rank], groups_of[i + 1][rank]) for i in (0, 2)]
        groups = TwoGroups(*pairs[0], others=pairs[1])
        device = torch.device("cpu") if on_device else None
        wires = [DType.F32] * len(SPEC.layout.units)
        mine = NodeSteps(steps, groups, SPEC, wires, 2, device=device, meter=Meter())  # type: ignore[arg-type]
        try:
            results[rank] = [step(mine, steps, groups, moment) for moment in (when, "", "")]
        except Exception as error:
            results[rank] = error
        finally:
            mine.close()

    results: list[Any] = [None, None]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    with stand_in() if on_device else contextlib.nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        assert isinstance(result, list), result
        for gathered, _ in result:
            assert all(np.array_equal(out, np.arange(n)) for out, n in zip(gathered, UNITS, strict=True))
        first = Outcome.COMMIT if when == "agree" else Outcome.ABORT  # groups were made again before anything was done
        assert [outcome for _, outcome in result] == [first, Outcome.COMMIT, Outcome.COMMIT]


def test_a_step_of_before_a_change_has_a_void_ticket_whoever_of_the_node_knows_of_it() -> None:
    notified = [threading.Barrier(3), threading.Barrier(3)]

    def do(mine: NodeSteps, steps: ShardSteps, rank: int) -> Any:
        began = steps.latest
        mine.agree()
        notified[0].wait()
        if rank == 1:  # it hears of a restore, after forward and before the others
            steps.epoch = 1
        after_forward = mine.ticket(began)
        mine.agree()  # the others have still notified of nothing, and gather what is there now all the same
        before_forward = mine.ticket(steps.latest)
        notified[1].wait()
        steps.epoch = 1
        again = mine.ticket(steps.latest)
        return [t.is_void and t.shared.is_void for t in (after_forward, before_forward, again)]

    assert node(do) == [[True, True, False]] * 3


def test_queued_work_is_complete_when_the_work_it_started_is() -> None:
    outer, inner = concurrent.futures.Future[Any](), concurrent.futures.Future[None]()
    push = QueuedWork[None](outer, "pushing")
    assert not push.is_completed()
    outer.set_result(Work(inner, "pushing"))
    assert not push.is_completed()
    with pytest.raises(Timeout):
        push.wait(0.0)
    inner.set_exception(Broken("lost"))
    assert push.is_completed()
    with pytest.raises(Broken):
        push.wait(0.0)
    failed = concurrent.futures.Future[Any]()
    failed.set_exception(Broken("lost"))
    assert QueuedWork[None](failed, "pushing").is_completed()
