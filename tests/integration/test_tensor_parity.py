"""Tensor-parallel models on real processes, alone and under DDP, train what one process trains; DCP reshapes them.

Tests of `parallel/tensor/dcp.py`.
"""

from __future__ import annotations

import numpy as np

import tables
from axon_ps.testing import LocalCluster
from parity_model import distance
from tables import Record
from tensor_model import everything, train_plain

CASES = [(2, 2, False), (2, 2, True), (1, 4, False), (1, 4, True)]  # data, tensor, sequence_parallel


def test_meshes_of_data_and_tensor_equal_one_process(record_property: Record) -> None:
    with LocalCluster(shards=1, world_size=4) as cluster:
        results = cluster.run_workers(everything, args=(CASES, str(cluster.directory / "dcp")))
    expected, expected_norms = train_plain()
    for case, *ranks in zip(CASES, *(result.value for result in results), strict=True):
        off = max(distance(full, {n: v.numpy() for n, v in expected.items()}) for full, _, _ in ranks)
        data, tensor, sequence = case
        tables.add(
            record_property,
            tables.PARITY,
            wrapper="TensorParallel" + (" under DDP" if data > 1 else ""),
            setting=f"mesh {data} x {tensor}" + (", sequence parallel" if sequence else ""),
            precision="f32",
            workers=data * tensor,
            off_by=f"{off:.1e}",
            allowed="1e-05",
        )
        assert off <= 1e-5, case
        for _, norms, backend in ranks:
            assert backend == "shm"
            np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
        first = ranks[0][0]
        assert all(np.array_equal(full[name], value) for full, _, _ in ranks for name, value in first.items())
