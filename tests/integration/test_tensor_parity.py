"""Tensor-parallel models on real processes, alone and under DDP, train what one process trains; DCP reshapes them."""

from __future__ import annotations

import numpy as np

from axon_ps.testing import LocalCluster
from tensor_model import everything, train_plain

CASES = [(2, 2, False), (2, 2, True), (1, 4, False), (1, 4, True)]  # data, tensor, sequence_parallel


def test_meshes_of_data_and_tensor_equal_one_process() -> None:
    with LocalCluster(shards=1, world_size=4) as cluster:
        results = cluster.run_workers(everything, args=(CASES, str(cluster.directory / "dcp")))
    expected, expected_norms = train_plain()
    for case, *ranks in zip(CASES, *(result.value for result in results), strict=True):
        for whole, norms, backend in ranks:
            assert backend == "shm"
            np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
            assert sorted(whole) == sorted(expected)
            for name, value in expected.items():
                difference = np.linalg.norm(whole[name] - value.numpy())
                assert difference <= 1e-5 * np.linalg.norm(value.numpy()), f"{name} differs in {case}"
        first = ranks[0][0]
        assert all(np.array_equal(whole[name], value) for whole, _, _ in ranks for name, value in first.items())
