"""Wrappers on a real GPU with one rank: what they train is what plain torch trains there; and what crosses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.collectives import arrays, cuda
from axon_ps.collectives.staging import Staging
from axon_ps.errors import AxonError
from axon_ps.parallel.comm_hooks import device_codecs
from axon_ps.sharding.plan import PlanOptions
from axon_ps.types import INT8_BLOCK_NUMEL
from job_services import JobServices
from job_worker import joined
from parity_model import Block, batch, build

pytestmark = pytest.mark.gpu
STEPS = 4
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "DDP")


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skips, with the reason, where there is none."""
    try:
        cuda.load()
    except AxonError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """The coordinators of a job for each strategy."""
    with JobServices([(1, 2)] * len(STRATEGIES)) as services:
        yield services.addresses


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses of some steps on the GPU."""
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, 0).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def wrapped(strategy: str, world: axon_ps.World) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = build().cuda()
    if strategy == "DDP":
        ddp = parallel.DDP(module, world.default_group)
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    model = parallel.FSDP(
        module,
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[strategy],
        unit_types={Block},
        plan_options=PlanOptions(chunk_numel=512, min_slice_numel=128),
    )
    kind: Any = torch.optim.AdamW if strategy == "NO_SHARD" else parallel.AdamW
    return model, kind(model.parameters(), lr=3e-3)


def test_every_strategy_trains_what_plain_torch_trains(addresses: list[str]) -> None:
    plain = build().cuda()
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3))
    for strategy, address in zip(STRATEGIES, addresses, strict=True):
        with joined(address, 0, 1) as world:
            losses = trained(*wrapped(strategy, world))
        np.testing.assert_allclose(losses, expected, rtol=2e-4, err_msg=strategy)


def test_what_crosses_arrives_in_both_directions_behind_what_the_stream_does() -> None:
    staging = Staging()
    tensor = torch.zeros(1 << 22, device="cuda")
    flat = arrays.flatten(tensor)
    host = staging.allocate(flat.array)
    with arrays.on_stream(flat):
        for number in range(1, 20):
            tensor.add_(1.0)  # not waited for
            staging.download(flat.array, host)
            assert host[0] == host[-1] == number
            host[:] = -number
            staging.upload(host, flat.array)
            assert tensor[-1] == -number
            tensor.fill_(number)
    staging.free(host)
    assert staging.statistics()["downloaded_bytes"] == 19 * tensor.nbytes
    assert torch.from_numpy(host).is_pinned()


@pytest.mark.parametrize("numel", [1, 1000, 1 << 20])
def test_compression_on_the_gpu_writes_the_bytes_of_the_cpu(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    made = []
    for where in ("cpu", "cuda"):
        residual = torch.full((numel,), 0.01, device=where)
        blocks = torch.empty(-(-numel // INT8_BLOCK_NUMEL), device_codecs.BLOCK_BYTES, dtype=torch.uint8, device=where)
        device_codecs.encode_blocks(values.to(where), blocks, residual)
        pairs = torch.empty(8 * max(1, numel // 100), dtype=torch.uint8, device=where)
        again = residual.clone()
        device_codecs.top_k(values.to(where), pairs, again)
        made.append([t.cpu() for t in (blocks, residual, pairs, again)])
    for what, a, b in zip(("blocks", "residual", "pairs", "residual of top-k"), *made, strict=True):
        assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} differ"
