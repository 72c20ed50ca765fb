"""NCCL inside nodes and gRPC between them, on stand-ins for GPUs: two nodes of two workers, real processes.

Every training is done twice, once in host memory (shm inside a node) and once in device memory, and must come to the
same. The trace of the second shows what crossed between a GPU and its host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from device_worker import STEPS
from job_worker import Job
from many_jobs import run_jobs
from parity_model import build, distance

CASES = [
    ("HYBRID_SHARD", "float32"),
    ("HYBRID_SHARD", "bfloat16"),
    ("NO_SHARD", "float32"),
    ("DDP", "float32"),
]
COMPRESSED = [("DDP", "int8"), ("DDP", "top_k")]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}
"""Largest ||a - b|| / ||b|| of a parameter after a few steps of AdamW, which makes much of little."""
AGREEMENT_BYTES = 2048
"""More than the words by which the ranks of a group compare their calls; less than any stripe of the model is."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What the workers returned: each case in host memory, then on the device; the suite."""

    def job(function: str, *args: Any) -> Job:
        return Job(function=f"device_worker:{function}", args=args, workers=4, servers=2, per_node=2)

    alone = [case for case in CASES if case[0] == "HYBRID_SHARD"]  # a job has one model on its servers
    together = [*(case for case in CASES if case not in alone), *COMPRESSED]
    jobs = [job("train", *case, on_device) for case in alone for on_device in (False, True)]
    jobs += [job("train_each", together, on_device) for on_device in (False, True)]
    *trained, host, device, suite = run_jobs([*jobs, job("conform")], tmp_path_factory.mktemp("nccl"))
    for i in range(len(together)):
        trained += [[worker[i] for worker in host], [worker[i] for worker in device]]
    return [*trained, suite]


def test_every_wrapper_comes_to_the_same_over_nccl_as_over_shared_memory(results: list[list[Any]]) -> None:
    for i, case in enumerate((*CASES, *COMPRESSED)):
        host, device = results[2 * i], results[2 * i + 1]
        for (expected, _), (values, _) in zip(host, device, strict=True):
            if case[0] == "HYBRID_SHARD" or case in COMPRESSED:
                assert all(np.array_equal(values[name], expected[name]) for name in expected), case
            else:  # what is small is added up in rank order in host memory, and on the device by nodes
                assert distance(values, expected) < TOLERANCE[case[1]], case


def test_nothing_crosses_to_the_host_but_the_stripe_of_each_rank(results: list[list[Any]]) -> None:
    numel = sum(p.numel() for p in build().parameters())
    for steps in (steps for i, _ in enumerate(COMPRESSED) for _, steps in results[2 * (len(CASES) + i) + 1]):
        # nobody's gradient crosses but in compressed form: int8 takes a quarter, a top-k of 1 % less
        assert all(s["largest other"] < 0.3 * 4 * numel for s in steps)
    num_params = len(list(build().parameters()))
    for i, (strategy, wire) in enumerate(CASES):
        item = 2 if wire == "bfloat16" else 4
        extra = num_params if strategy == "NO_SHARD" else 0  # one number each says whether anybody has a gradient
        whole = item * (numel + extra)
        workers = [steps for _, steps in results[2 * i + 1]]
        for step in range(STEPS):
            for node in (workers[:2], workers[2:]):
                crossed = [worker[step]["bytes"] for worker in node]
                # the stripes of a node's ranks are the gradient, once; the parameters, or the averages, come back
                assert sum(c["download"] for c in crossed) == whole, (strategy, wire, step, crossed)
                assert max(c["download"] for c in crossed) < 0.75 * whole
                assert all(worker[step]["largest other"] < AGREEMENT_BYTES for worker in node), (strategy, crossed)
                came = [sum(worker[s]["bytes"]["upload"] for worker in node) for s in range(STEPS)]
                if strategy == "HYBRID_SHARD":  # the next version's, as far as it is prefetched, came a step earlier
                    assert STEPS * whole <= sum(came) <= (STEPS + 1) * whole, (wire, came)
                else:
                    assert came[step] == whole, (strategy, wire, came)
                assert all(c.get("allGather", 0) + c.get("broadcast", 0) > 0 for c in crossed)


def test_a_group_over_nodes_conforms_in_device_memory(results: list[list[Any]]) -> None:
    assert [failures for failures in results[-1] if failures] == []
