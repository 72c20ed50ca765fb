"""A worker that is killed and started again needs nobody: at every moment of the main example, on both ranks.

Every life of a rank but its last ends by SIGKILL at another moment; its successor joins the job under way. The others
are not touched, so whatever a joiner or a survivor waited for that cannot come would be a test that does not end.
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

from axon_ps.host.children import wait_for_any
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess
from deadlines import HANG_S
from joiner_lives import MOMENTS, live

ALL_S = HANG_S
RANK_0 = ["upload", "first forward", "vote", "backward", "agreement", "checkpoint", "finish", "export"]
RANK_1 = ["init", "construction", "registered", "optimizer", "forward", "between steps", "validation", "backward"]
WHEN_TRAINED = {"validation", "finish", "export", ""}
"""Lives that go through the whole training; the others end in it."""


def test_every_moment_is_used() -> None:
    assert {*RANK_0, *RANK_1} == set(MOMENTS)


def lived(lives: dict[int, list[str]], directory: Path, min_workers: int | None = None) -> list[tuple[float, str]]:
    """What came of each rank, whose lives end at these moments, the last one by itself.

    A life that would train alone to the end begins when the others' lives that end in training are over.
    """
    ends = {rank: [*moments, ""] for rank, moments in lives.items()}
    with LocalCluster(shards=2, world_size=2, min_workers=min_workers) as cluster:
        alive: dict[int, WorkerProcess] = {}
        deadline, results = time.monotonic() + ALL_S, {}
        while len(results) < len(lives):
            for rank, left in ends.items():
                others = {moment for other, its in ends.items() if other != rank for moment in its}
                alone = min_workers == 1 and left[:1] and left[0] in WHEN_TRAINED
                if rank not in alive and left and not (alone and others - WHEN_TRAINED):
                    alive[rank] = cluster.start_workers(live, ranks=[rank], args=(left[0], str(directory)))[0]
            processes = [worker.process for worker in alive.values()]
            ended = wait_for_any(processes, deadline) or processes
            for rank, worker in list(alive.items()):
                if worker.process in ended:
                    result = worker.end()
                    assert not result.error or result.exit_code == -signal.SIGKILL, f"{rank}: {result.error}"
                    moment = ends[rank].pop(0)
                    assert bool(moment) == (result.exit_code == -signal.SIGKILL), f"{rank} lived past {moment}"
                    results |= {} if moment else {rank: result.value}
                    del alive[rank]
    return [results[rank] for rank in sorted(results)]


def test_killed_at_every_moment_and_started_again(tmp_path: Path) -> None:
    first, second = lived({0: RANK_0, 1: RANK_1}, tmp_path / "killed")
    assert first == second, "validation loss, and every bit of the parameters"
    assert lived({0: [], 1: []}, tmp_path / "unfailed") == [first, second], "as if nobody had ever died"
    assert 1.0 < first[0] < math.log(256), "it has learned something"


def test_a_standby_waits_without_a_rank_and_takes_a_dead_workers_place(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        (standby,) = cluster.start_workers(live, ranks=[-1], args=("", str(tmp_path)), env={"AXON_PS_STANDBY": "1"})
        (first,) = cluster.start_workers(live, ranks=[0], args=("", str(tmp_path)))
        (second,) = cluster.start_workers(live, ranks=[1], args=("forward", str(tmp_path)))
        assert second.result(ALL_S).exit_code == -signal.SIGKILL
        results = [worker.result(ALL_S) for worker in (first, standby)]
    assert [result.error for result in results] == ["", ""], results
    assert results[0].value == results[1].value


def test_killed_at_every_moment_while_the_others_go_on(tmp_path: Path) -> None:
    first, second = lived({0: RANK_0[1::2], 1: RANK_1[::2]}, tmp_path, min_workers=1)
    assert first == second
    assert 1.0 < first[0] < math.log(256)
