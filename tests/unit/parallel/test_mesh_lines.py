"""Workers of a mesh tell each other ranks, units, and the optimizer's groups. A dict stands for the job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.fsdp.mesh.groups import OptimizerGroups
from axon_ps.parallel.fsdp.mesh.joining import check_divided, joined
from axon_ps.parallel.fsdp.mesh.lines import MeshLines, meet
from axon_ps.parallel.fsdp.strategy import ShardingStrategy

LINES = ((0, 1), (2, 3))
ROWS = ((10, 12), (11, 13))


class Job:
    """The key-value store of a job, for the workers of a process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def world(self, rank: int = 0, size: int = 4) -> Any:
        workers = [SimpleNamespace(rank=10 + n) for n in range(size)]
        return SimpleNamespace(
            rank=rank,
            world_size=size,
            membership=SimpleNamespace(workers=workers),
            kv_put=self.put,
            kv_get=self.values.get,
            kv_wait=self.wait,
            kv_delete=self.values.pop,
            kv_compare_and_set=lambda key, _, value: key not in self.values and self.put(key, value),
        )

    def put(self, key: str, value: bytes) -> bool:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()
        return True

    def wait(self, key: str, timeout_s: float = 10.0) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, timeout_s)
        return self.values[key]

    def line(self, own: int, replica: int = 0) -> MeshLines:
        return MeshLines(world=self.world(), name="m", own=own, lines=LINES, replica=replica, rows=ROWS)


def both(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(10.0) for future in [pool.submit(call) for call in calls]]


def test_each_line_gets_what_the_others_gave() -> None:
    job = Job()
    given = both(lambda: job.line(0).exchange("x", [1]), lambda: job.line(1).exchange("x", [2]))
    assert given == [[[1], [2]], [[1], [2]]]
    assert job.line(1, replica=1).exchange("x", [2]) == [[1], [2]]
    with pytest.raises(
        LayoutMismatch, match=r"the x of model 'm' differ between workers of line 1.*'\[2\]' and '\[3\]'"
    ):
        job.line(1, replica=1).exchange("x", [3])


def test_a_released_model_leaves_nothing() -> None:
    job = Job()
    lines = [job.line(0), job.line(1)]
    both(*(lambda line=line: line.exchange("x", 1) for line in lines))
    for line in lines:
        line.forget()
    assert job.values == {}


def test_workers_meet_though_torch_numbers_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    ranks = [13, 12, 11, 10]  # the job's, by torch's
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)

    def one(rank: int) -> MeshLines:
        line = next(line for line in LINES if rank in line)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return meet(job.world(ranks[rank]), "m", line, 10.0)

    for rank in range(1, 4):  # as if they had come before, and wait
        line = next(line for line in LINES if rank in line)
        job.values[f"axon_ps/mesh/m/ranks/{rank}"] = f'{{"rank": {ranks[rank]}, "line": {list(line)}}}'.encode()
    found = one(0)
    assert (found.own, found.replica, found.lines, found.rows) == (0, 0, LINES, ((13, 11), (12, 10)))
    assert found.grouping.rows == found.rows


@pytest.mark.parametrize("line", [(0, 2), (0, 1, 2)])
def test_axes_that_are_not_of_one_mesh_are_refused(line: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for rank in range(1, 4):
        of = next(of for of in LINES if rank in of)
        job.values[f"axon_ps/mesh/m/ranks/{rank}"] = f'{{"rank": {10 + rank}, "line": {list(of)}}}'.encode()
    with pytest.raises(InvalidRequest, match="give the axis of one mesh"):
        meet(job.world(10), "m", line, 10.0)


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with pytest.raises(InvalidRequest, match="8 ranks and the world 4 workers"):
        meet(Job().world(), "m", (0, 1), 1.0)


def stage(*sizes: int) -> tuple[wrap.WrappedUnit, ...]:
    """The units of a module of a stage: the root with the first layer, and a unit for each other."""
    module = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))
    return wrap.partition(module, lambda child: child in list(module)[1:])


def test_stages_of_a_pipeline_join() -> None:
    job = Job()
    units = stage(2, 3), stage(5)
    found = both(*(lambda n=n: joined(job.line(n), f"Stage{n}", units[n]) for n in (0, 1)))
    assert [model for model, _, _ in found] == ["Stage0", "Stage0"]
    assert found[0][1] == found[1][1]
    assert [p.name for _, p in found[0][1].parameters()] == ["0.weight@0", "1.weight", "0.weight@1"]
    first, last = found[0][2], found[1][2]
    assert [(unit.number, unit.names, unit.pushes) for unit in first] == [
        (0, (("0.weight",),), True),
        (1, (("1.weight",),), True),
    ]
    assert [(unit.number, unit.names, unit.params) for unit in last] == [(2, (("0.weight",),), units[1][0].params)]


def groups(job: Job) -> list[OptimizerGroups]:
    units = stage(2, 3), stage(5)
    found = both(*(lambda n=n: joined(job.line(n), "Stage", units[n]) for n in (0, 1)))
    return [OptimizerGroups(job.line(n), found[n][1]) for n in (0, 1)]


def test_the_groups_of_all_lines_are_known_to_each() -> None:
    first, last = groups(Job())
    wanted = [(1, 0, 1)] * 2
    assert both(lambda: first.of_all({0: [1], 1: [0]}, 2), lambda: last.of_all({2: [1]}, 2)) == wanted
    assert first.of_all({0: [1], 1: [0]}, 2) == wanted[0], "nothing has changed, so no other worker is asked"
    changed = both(lambda: first.of_all({0: [1], 1: [2]}, 3), lambda: last.of_all({2: [1]}, 3))
    assert changed == [(1, 2, 1)] * 2


def test_lines_with_other_numbers_of_groups_are_refused() -> None:
    first, last = groups(Job())

    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(InvalidRequest) as found:
            call()
        return str(found.value)

    said = both(
        lambda: refused(lambda: first.of_all({0: [0], 1: [0]}, 1)), lambda: refused(lambda: last.of_all({2: [1]}, 2))
    )
    assert "1 groups in line 0 of the mesh and 2 in line 1" in said[0]
    assert "2 groups in line 1 of the mesh and 1 in line 0" in said[1]


def test_strategies_that_need_all_of_a_model_are_refused() -> None:
    units = stage(2)
    check_divided(units, (0, 1), ShardingStrategy.FULL_SHARD)
    check_divided(units, (), ShardingStrategy.NO_SHARD)
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD):
        with pytest.raises(InvalidRequest, match="use FULL_SHARD or SHARD_GRAD_OP"):
            check_divided(units, (0, 1), strategy)
