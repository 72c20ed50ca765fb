"""Models on meshes of data, tensor and pipeline parallelism, in real processes, against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S
from mesh_training import Trained, train
from mesh_variants import variants

STEPS = 50
FEWER = 12


def trained(tmp_path: Path, dp: int, pp: int, tp: int, *, steps: int = STEPS, killed: int = -1) -> list[Trained]:
    """The outcomes of all workers that end in order. The partners of one that is killed do not."""
    size = dp * pp * tp
    with LocalCluster(shards=1, world_size=size, min_workers=1, lease_s=5.0) as cluster:
        workers = cluster.start_workers(train, args=(tmp_path / "store", dp, pp, tp, steps, killed))
        results = [worker.result(WHOLE_S) for worker in workers]
    found = [result.value for result in results if not result.error]
    assert len(found) == (size if killed < 0 else size - pp * tp), [(r.error, r.output[-2000:]) for r in results]
    return found


@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 1, 2)])
def test_parameters_are_those_of_plain_torch(dp: int, pp: int, tp: int, tmp_path: Path) -> None:
    found = trained(tmp_path, dp, pp, tp)
    for each in found:
        assert each.committed == dict.fromkeys(range(STEPS), dp)
        assert each.differs < 1e-5
        assert all(differs < 1e-5 for differs in each.divided_differs.values())
        assert bool(each.divided_differs) == (tp > 1)
        assert each.norms == found[0].norms


@pytest.mark.parametrize(("pp", "tp", "killed"), [(1, 2, 1), (2, 1, 3), (2, 1, 1)])
def test_a_replica_goes_on_without_one_that_lost_a_worker(pp: int, tp: int, killed: int, tmp_path: Path) -> None:
    for each in trained(tmp_path, 2, pp, tp, steps=FEWER, killed=killed):
        replicas = list(each.committed.values())
        assert replicas[0] == 2
        assert replicas[-1] == 1
        assert replicas == sorted(replicas, reverse=True)
        assert len(replicas) >= FEWER - 1
        assert each.differs < 1e-5


def test_forms_of_parameters_and_values(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        first, second = (r.value for r in cluster.run_workers(variants, args=(tmp_path / "store",), timeout_s=WHOLE_S))
    assert first == second
    differ = {name: value for name, value in first.items() if value is not True}
    assert differ.pop("bfloat16") < 2e-2
    assert differ == pytest.approx(dict.fromkeys(differ, 0.0), abs=1e-5)
    assert len(first) == 12
