"""The conformance suite over every backend, in real processes. Launching them takes longest, so some share it.

Tests of `collectives/backends/shm/exchange.py`, `collectives/backends/shm/large.py`,
`collectives/backends/shm/mailbox.py` and `collectives/backends/shm/rendezvous.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from axon_ps.testing import LocalCluster, WorkerResult
from axon_ps.testing.workers import results_of
from axon_ps_lab.conformance import SIZES, conformance_worker
from deadlines import WHOLE_S

# Groups are of the last ranks: one rank each on two nodes, 2 and 1, 2 and 2, 4 and 3.
NODES = "abababa"


def launch(backends: Mapping[str, bool], nodes: str) -> list[WorkerResult]:
    """One worker for each letter, on the node it says; `backends` are names and whether their order is exact."""
    sizes = [size for size in SIZES if size <= len(nodes)]
    with LocalCluster(shards=2, world_size=len(nodes)) as cluster:
        workers = [
            worker
            for rank, node in enumerate(nodes)
            for worker in cluster.start_workers(
                conformance_worker, args=(backends, sizes), env={"AXON_PS_NODE": node}, ranks=[rank]
            )
        ]
        return results_of(workers, timeout_s=WHOLE_S, check=True)


def check(results: list[WorkerResult], backend: str) -> None:
    for size in (size for size in SIZES if size <= len(results)):
        reports = [result.value[backend][size] for result in results[-size:]]
        assert [f"rank {i}: {f}" for i, report in enumerate(reports) for f in report.failures] == []
        assert all(report.passed >= 13 for report in reports)
        assert size == 1 or all(len(report.skipped) <= 1 for report in reports)


def test_flat_backends_in_processes() -> None:
    results = launch({"shm": True, "grpc": True}, NODES)
    check(results, "shm")
    check(results, "grpc")


def test_hierarchical_over_shm_and_grpc_in_processes() -> None:
    check(launch({"hierarchical": False}, NODES), "hierarchical")


def test_gloo_in_processes() -> None:
    # Loading torch takes seven processes long; a gloo group of 7 is in test_conformance_threads.py.
    check(launch({"gloo": False}, "aaaa"), "gloo")
