"""Replicas whose workers have different units of one model: sums, norms, a death, a replacement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from mesh_worker import MAX_NORM, Steps, expected, train


def check(seen: Steps, replicas: dict[int, int]) -> None:
    """Compare the norms and values with those of numpy."""
    norms, values = expected(replicas)
    assert seen.norms == pytest.approx({version: norms[version] for version in seen.norms}, rel=1e-5)
    for unit, value in seen.values.items():
        np.testing.assert_allclose(value, values[unit], atol=1e-5)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_mesh_makes_the_steps_of_one_model(shards: int, tmp_path: Path) -> None:
    with LocalCluster(shards=shards, world_size=4) as cluster:
        results = cluster.run_workers(train, args=(8, (-1, 0), -1, tmp_path, HANG_S))
    for result in results:
        seen = result.value
        assert seen.error == ""
        assert seen.replicas == dict.fromkeys(range(1, 9), 2)
        assert len(seen.values) == 3
        check(seen, seen.replicas)
    assert any(norm > MAX_NORM for norm in results[0].value.norms.values()), "clipped by the norm of all units"


def test_one_dies_the_other_replica_goes_on_and_a_replacement_completes_it(tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=4, min_workers=1, lease_s=5.0) as cluster:
        workers = cluster.start_workers(train, args=(12, (3, 3), 7, tmp_path, HANG_S))
        workers[3].result(HANG_S)
        workers[3] = cluster.start_workers(train, args=(12, (3, 3), 7, tmp_path, HANG_S), ranks=[3])[0]
        seen = [worker.result(HANG_S).value for worker in workers]
    replicas = seen[0].replicas
    assert sorted(replicas) == list(range(1, 13))
    assert [replicas[version] for version in (1, 2, 3, 12)] == [2, 2, 2, 2]
    assert 1 in replicas.values()
    assert seen[0].aborts >= 1
    for each in seen:
        assert each.error == ""
        assert all(replicas[version] == count for version, count in each.replicas.items())
        check(each, replicas)
    assert not set(seen[2].replicas) & {version for version, count in replicas.items() if count == 1}


def test_without_a_replacement_the_partner_is_told_and_the_others_end(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=4, min_workers=1) as cluster:
        workers = cluster.start_workers(train, args=(10, (3, 4), -1, tmp_path, 8.0))
        workers[3].result(HANG_S)
        seen = [worker.result(HANG_S).value for worker in workers[:3]]
    assert [each.error for each in seen[:2]] == ["", ""]
    assert sorted(seen[0].replicas) == list(range(1, 11))
    check(seen[0], seen[0].replicas)
    assert seen[2].error.startswith(
        "Timeout: worker 2 is in no replica: rank 3 of ranks (2, 3), which make a replica together, is missing; start "
        "a worker in its place, or the job anew: none came after 8 s"
    )
