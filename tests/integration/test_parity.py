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

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from parity_model import STEPS, Values, train_plain, train_sharded

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


@pytest.mark.parametrize(("strategy", "workers", "servers", "optimizer"), CASES)
def test_equals_plain_torch_on_the_joined_batch(strategy: str, workers: int, servers: int, optimizer: str) -> None:
    kind, options = OPTIMIZERS[optimizer]
    with LocalCluster(shards=servers, world_size=workers) as cluster:
        results = cluster.run_workers(train_sharded, args=(kind, options, strategy))
    expected, norms = train_plain(kind, options, workers)
    for result in results:
        values, got_norms, _ = result.value
        np.testing.assert_allclose(got_norms, norms, rtol=1e-5)
        assert_close(values, expected, 1e-5)


def test_the_same_job_twice_gives_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        with LocalCluster(shards=2, world_size=3) as cluster:
            results = cluster.run_workers(
                train_sharded,
                args=("AdamW", {"lr": 3e-3}, "FULL_SHARD", {"wire_dtype": torch.bfloat16}),
            )
        runs.append([(result.value[0], result.value[1]) for result in results])
    first = runs[0][0]
    for values, norms in (*runs[0], *runs[1]):
        assert norms == first[1]
        assert all(np.array_equal(values[name], value) for name, value in first[0].items())


@pytest.mark.parametrize("precision", [{}, {"wire_dtype": torch.bfloat16}], ids=["f32", "bf16 wire"])
def test_gathering_ahead_of_the_decision_changes_no_bit(precision: dict[str, torch.dtype]) -> None:
    runs = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        with LocalCluster(shards=2, world_size=2) as cluster:
            results = cluster.run_workers(
                train_sharded, args=("Adam", {"lr": 3e-3}, strategy, precision), kwargs={"max_norm": 0.0}
            )
        runs += [result.value for result in results]
    first_values, first_norms, _ = runs[0]
    for values, norms, _ in runs[1:]:
        assert norms == first_norms
        assert all(np.array_equal(values[name], value) for name, value in first_values.items())
    for _, _, statistics in runs[2:]:  # each step but the first gathered ahead, and gathered nothing again
        assert statistics["gathers"] == 3 + 3 * STEPS


class Linear(torch.nn.Module):
    """A sum of products: its gradients are the data, exact in any order of summation when the data are integers."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, numel))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return (self.weight * data).sum()


def integers(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(-8, 9, (1000,), generator=generator).float()


def train_lion() -> Any:
    with axon_ps.World.init(timeout_s=60.0) as world:
        options = PlanOptions(chunk_numel=100, min_slice_numel=64)
        model = parallel.FSDP(Linear(1000), world.default_group, plan_options=options)
        optimizer = parallel.Lion(model, lr=1e-2, weight_decay=0.1)
        for step in range(20):
            model(integers(step, world.replica)).backward()
            assert optimizer.step().committed
        value = model.state_dict()["weight"].numpy().copy()
        world.barrier("done")
        return value


def test_lion_equals_its_paper_on_identical_gradients() -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        results = cluster.run_workers(train_lion)
    weight, momentum = Linear(1000).weight.detach(), torch.zeros(1000)
    for step in range(20):  # Chen et al. 2023, algorithm 2
        grad = (integers(step, 0) + integers(step, 1)) / 2
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * momentum + (1 - 0.9) * grad)
        momentum = 0.99 * momentum + (1 - 0.99) * grad
    for result in results:
        np.testing.assert_allclose(result.value, weight.numpy(), rtol=1e-5, atol=1e-6)
