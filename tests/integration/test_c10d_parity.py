"""PyTorch's DDP, FSDP2, HSDP, tensor parallel, pipelines and DCP train over "axon" what they train over gloo."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import c10d_scenarios
from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S

ALL = [scenario.__name__ for scenario in c10d_scenarios.SCENARIOS]
OF_TWO = ["ddp", "fsdp2", "hsdp", "tensor_parallel", "pipeline_1f1b", "checkpoint"]


@pytest.mark.parametrize(
    ("world_size", "names", "nodes"), [(2, OF_TWO, 2), (4, ALL, 1)], ids=["2 through gRPC", "4 through shared memory"]
)
def test_parameters_are_those_of_gloo(world_size: int, names: Sequence[str], nodes: int) -> None:
    with LocalCluster(shards=1, world_size=world_size) as cluster:
        results = cluster.run_workers(
            c10d_scenarios.compare, args=(str(cluster.directory), names, nodes), timeout_s=WHOLE_S
        )
    for result in results:
        assert sorted(result.value) == sorted(names)
        assert {name: difference for name, difference in result.value.items() if difference > 1e-6} == {}
