"""Modules that mixed precision leaves alone, as torch's FSDP does it: `MixedPrecision._module_classes_to_ignore`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from axon_ps import World
from axon_ps.parallel import FSDP, SGD, MixedPrecision, ShardingStrategy, estimate
from axon_ps.parallel.precision import CastForF32
from axon_ps.testing import run_threads

STEPS = 4
BF16, F32 = torch.bfloat16, torch.float32


class Block(nn.Sequential):
    """A unit."""


def model_of() -> nn.Module:
    torch.manual_seed(0)
    inner = Block(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8))
    return nn.Sequential(inner, nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))


def watched(model: nn.Module) -> list[tuple[torch.dtype, ...]]:
    """The dtypes with which each leaf ran: of its input, output, parameters and buffers."""
    seen: list[tuple[torch.dtype, ...]] = []

    def see(module: nn.Module, inputs: Any, output: Any) -> None:
        own = [*module.parameters(), *module.buffers()]
        seen.append((inputs[0].dtype, output.dtype, *(tensor.dtype for tensor in own)))

    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(see)
    return seen


def train(model: nn.Module, optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(16, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (True, {}),
        (False, {"buffer_dtype": BF16}),
        (True, {"buffer_dtype": BF16, "_module_classes_to_ignore": ()}),
        (True, {"buffer_dtype": BF16, "_module_classes_to_ignore": (nn.LayerNorm,)}),
        (True, {"buffer_dtype": BF16}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_run_as_under_torchs_fsdp(policy: bool, fields: dict[str, Any], strategy: str) -> None:
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block})} if policy else {}
    options["mixed_precision"] = torchs.MixedPrecision(param_dtype=BF16, reduce_dtype=F32, **fields)
    plain = model_of()
    theirs_seen = watched(plain)
    theirs = torchs.FullyShardedDataParallel(plain, use_orig_params=True, device_id=torch.device("cpu"), **options)
    losses = train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))

    def run(world: World) -> tuple[list[float], list[tuple[torch.dtype, ...]]]:
        model = model_of()
        seen = watched(model)
        wrapped = FSDP(model, world, sharding_strategy=strategy, **options)
        return train(wrapped, SGD(wrapped.parameters(), lr=0.1)), seen

    [(ours, seen)] = run_threads(run, 1)
    assert seen == theirs_seen
    assert ours == pytest.approx(losses, rel=2e-2)


def test_the_wire_holds_the_values_that_are_not_cast() -> None:
    def run(world: World) -> tuple[bool, float]:
        precision = MixedPrecision(param_dtype=BF16, uncast_types=(nn.BatchNorm1d,))
        model = FSDP(model_of(), world, unit_types={Block}, mixed_precision=precision)
        with torch.no_grad():
            model(torch.randn(16, 4))
        expected = estimate(model_of(), world, unit_types={Block}, mixed_precision=precision)
        numel = sum(param.numel() for param in model_of().parameters())
        sent = expected.of(ShardingStrategy.SHARD_GRAD_OP).sent_bytes
        return model.spec.precision.param.itemsize == 4, sent / numel

    assert run_threads(run, 1) == [(True, 4.0)]


def test_inputs_are_cast_and_outputs_back_if_they_were() -> None:
    seen: list[torch.dtype] = []

    class Pair(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
            seen.extend(tensor.dtype for tensor in pair)
            return {"sum": pair[0] + number, "count": torch.tensor(1)}

    module = Pair()
    CastForF32().register(module)
    indices = torch.arange(3)
    for dtype in (BF16, F32, torch.float16):
        made = module((torch.ones(3, dtype=dtype), indices), 2)
        assert (made["sum"].dtype, made["count"].dtype) == (dtype, torch.int64)
    assert seen == [F32, torch.int64] * 3
