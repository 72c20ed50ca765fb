"""Training on shard servers equals plain torch on the joined batch, and equals itself bit for bit.

RMSprop has a larger eps than torch's default, and is not centered: its first steps divide a gradient by little more
than its own size, so where the true gradient is near zero the rounding of a sum in another order is amplified. (Plain
torch, averaging per-replica gradients instead of joining the batches, differs from itself by 1.2e-5 with the default
eps.) The kernels' own tests hold both to torch.

Every pair of (strategy, workers), (strategy, servers), (workers, servers) and (optimizer, strategy) is covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from job_worker import Job
from many_jobs import run_jobs
from parity_model import STEPS, Linear, Values, integers, train_plain

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.5, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 3e-3, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 3e-3, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.05, "weight_decay": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.5, "eps": 1e-5}),
}

CASES = [  # strategy, workers, servers, optimizer
    ("FULL_SHARD", 1, 1, "adamw"),
    ("FULL_SHARD", 2, 2, "adam"),
    ("FULL_SHARD", 3, 3, "momentum"),
    ("FULL_SHARD", 2, 3, "adagrad"),
    ("FULL_SHARD", 3, 1, "rmsprop"),
    ("FULL_SHARD", 1, 2, "nesterov"),
    ("FULL_SHARD", 2, 1, "sgd"),
    ("SHARD_GRAD_OP", 1, 3, "momentum"),
    ("SHARD_GRAD_OP", 2, 1, "nesterov"),
    ("SHARD_GRAD_OP", 3, 2, "adamw"),
    ("SHARD_GRAD_OP", 1, 1, "adam"),
    ("SHARD_GRAD_OP", 2, 2, "rmsprop"),
    ("SHARD_GRAD_OP", 3, 3, "adagrad"),
    ("SHARD_GRAD_OP", 1, 2, "sgd"),
]


def assert_close(values: Values, expected: Values, relative: float) -> None:
    """||a - b|| <= relative * ||b|| for every tensor."""
    assert list(values) == list(expected)
    for name, value in expected.items():
        difference = float(np.linalg.norm(values[name].astype(np.float64) - value))
        assert difference <= relative * float(np.linalg.norm(value)), f"{name} differs by {difference}"


SPECULATIVE: list[dict[str, torch.dtype]] = [{}, {"wire_dtype": torch.bfloat16}]
"""Precisions that speculative gathers are tested in."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """Per kind of job, per job, what each of its workers returned."""
    twice = ("AdamW", {"lr": 3e-3}, "FULL_SHARD", {"wire_dtype": torch.bfloat16})
    kinds = {
        "parity": [train(workers, servers, *OPTIMIZERS[name], s) for s, workers, servers, name in CASES],
        "twice": [train(3, 2, *twice), train(3, 2, *twice)],
        "speculative": [
            train(2, 2, "Adam", {"lr": 3e-3}, strategy, precision, STEPS, 0.0, prefetch)
            for precision in SPECULATIVE
            for strategy, prefetch in (("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", True))
        ],
        "lion": [Job(function="parity_model:train_lion", workers=2, servers=2)],
    }
    by_job = iter(run_jobs([job for jobs in kinds.values() for job in jobs], tmp_path_factory.mktemp("parity")))
    return {kind: [next(by_job) for _ in jobs] for kind, jobs in kinds.items()}


def train(workers: int, servers: int, *args: Any) -> Job:
    """A job of `train_sharded`."""
    return Job(function="parity_model:train_sharded", args=args, workers=workers, servers=servers)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_plain_torch_on_the_joined_batch(
    results: dict[str, list[list[Any]]], case: tuple[str, int, int, str]
) -> None:
    _, workers, _, optimizer = case
    expected, norms = train_plain(*OPTIMIZERS[optimizer], workers)
    of_workers = results["parity"][CASES.index(case)]
    assert len(of_workers) == workers
    for values, got_norms, _ in of_workers:
        np.testing.assert_allclose(got_norms, norms, rtol=1e-5)
        assert_close(values, expected, 1e-5)


def test_the_same_job_twice_gives_the_same_bits(results: dict[str, list[list[Any]]]) -> None:
    runs = results["twice"]
    first, norms, _ = runs[0][0]
    for values, got_norms, _ in (*runs[0], *runs[1]):
        assert got_norms == norms
        assert all(np.array_equal(values[name], value) for name, value in first.items())


@pytest.mark.parametrize("number", range(len(SPECULATIVE)), ids=["f32", "bf16 wire"])
def test_speculative_gathers_change_no_bit(results: dict[str, list[list[Any]]], number: int) -> None:
    plain, full, grad_op = results["speculative"][3 * number : 3 * number + 3]
    first_values, first_norms, _ = plain[0]
    for values, norms, _ in (*plain, *full, *grad_op):
        assert norms == first_norms
        assert all(np.array_equal(values[name], value) for name, value in first_values.items())
    for _, _, statistics in grad_op:  # each step but the first gathered speculatively, and gathered nothing again
        assert statistics["gathers"] == 3 + 3 * STEPS


def test_lion_equals_its_paper_on_identical_gradients(results: dict[str, list[list[Any]]]) -> None:
    weight, momentum = Linear(1000).weight.detach(), torch.zeros(1000)
    for step in range(20):  # Chen et al. 2023, algorithm 2
        grad = (integers(step, 0) + integers(step, 1)) / 2
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * momentum + (1 - 0.9) * grad)
        momentum = 0.99 * momentum + (1 - 0.99) * grad
    for value in results["lion"][0]:
        np.testing.assert_allclose(value, weight.numpy(), rtol=1e-5, atol=1e-6)
