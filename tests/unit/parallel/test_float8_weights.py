"""Layers that compute in float8 with weights from the servers as float8: values, training, bytes, refusals.

Tests of `parallel/fsdp/tensors/float8_weights.py`, of float8 in `parallel/precision.py`, and of compressed bytes in
`fsdp/on_servers/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import (
    FSDP,
    AdamW,
    Float8,
    MixedPrecision,
    ShardingStrategy,
    estimate,
    fully_shard,
    sharded_model,
)
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.fsdp.tensors import float8_weights
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import run_threads
from mock_ranks import generator

STEPS, ROWS, WIDTH = 10, 8, 32
INPUTS = torch.randn(STEPS, ROWS, 16, generator=generator(2))
TARGETS = torch.randn(STEPS, ROWS, 4, generator=generator(3)) * 0.1
FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


class _ToFloat8(torch.autograd.Function):
    """The nearest float8 numbers with torchao's dynamic scale of the tensor, in high precision; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        codes, scale = in_float8(x)
        return (codes.float() / scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (448.0 / x.abs().max().double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class Float8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantised: Callable[[torch.Tensor], torch.Tensor] = _ToFloat8.apply
        return nn.functional.linear(quantised(x), quantised(self.weight), self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Float8Linear(WIDTH, 4 * WIDTH, bias=False), Float8Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """The same values every time."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = Float8Linear(16, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.out = Float8Linear(WIDTH, 4)
        values = generator(1)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if "norm" not in name:
                    p.copy_(torch.randn(p.shape, generator=values) * p.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def shard(model: Model, precision: Any = None, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mp_policy=precision, **options)
    return fully_shard(model, mp_policy=precision, **options)


def train(model: nn.Module, after_step: Callable[[], object] = lambda: None) -> list[float]:
    kind = AdamW if isinstance(model, FSDP) else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=3e-3)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after_step()
    return losses


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_training_is_that_of_plain_torch(workers: int, reshard: bool) -> None:
    plain = Model()
    expected = train(plain)

    def run(world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = shard(Model(), MixedPrecision(wire_dtype="float8_e4m3"), reshard_after_forward=reshard)
        return train(model), dict(sharded_model(model).full_parameters())

    for losses, values in run_threads(run, workers, shards=2):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(values[name], param.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_worker_computes_with_the_float8_numbers_of_the_master(compute: torch.dtype) -> None:
    def run(world: World) -> None:
        precision = MixedPrecision(param_dtype=compute, wire_dtype=torch.float8_e4m3fn)
        options = PlanOptions(chunk_numel=1000, min_slice_numel=64)  # so that tensors lie in several chunks
        model = FSDP(Model(), world, unit_types={Block}, mixed_precision=precision, plan_options=options)
        seen: dict[str, torch.Tensor] = {}

        def note(module: Any, args: Any) -> None:
            seen["up"], seen["norm"] = module.up.weight.detach().clone(), module.norm.weight.detach().clone()

        model.module.blocks[1].register_forward_pre_hook(note)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(INPUTS[step]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(INPUTS[step])
            masters = dict(model.full_parameters())
            codes, scale = in_float8(masters["blocks.1.up.weight"])
            torch.testing.assert_close(seen["up"], (codes.float() / scale).to(compute), rtol=0, atol=0)
            again, _ = in_float8(seen["up"])
            assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(seen["norm"], masters["blocks.1.norm.weight"].to(compute))

    run_threads(run, 2, shards=3)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, HYBRID])
def test_bytes_are_half_of_those_of_bf16_and_the_loss_falls_as_there(strategy: ShardingStrategy) -> None:
    def run(world: World, wire: Any) -> tuple[list[float], float, float]:
        precision = MixedPrecision(param_dtype=torch.bfloat16, wire_dtype=wire)
        options = {"unit_types": {Block}, "mixed_precision": precision}
        estimated = estimate(Model(), world, **options).of(strategy)
        model = FSDP(Model(), world, sharding_strategy=strategy, prefetch=False, **options)
        counted: list[float] = []

        def count() -> None:
            if strategy is HYBRID:  # by then what is gathered behind a step has arrived
                with torch.no_grad():
                    model(INPUTS[0])
            counted.append(model.statistics()["wire_bytes_in"])

        losses = train(model, count)
        return losses, counted[-1] - counted[-2], estimated.received_bytes

    results = {wire: run_threads(run, 2, args=(wire,)) for wire in (torch.bfloat16, "float8_e4m3")}
    counted = [sum(received for _, received, _ in of_workers) for of_workers in results.values()]
    (bf16, _, bf16_estimate), (losses, _, estimate_) = (of_workers[0] for of_workers in results.values())
    assert counted == pytest.approx([bf16_estimate, estimate_], rel=0.01)
    assert losses[-1] < 0.5 * losses[0]
    assert sum(losses) == pytest.approx(sum(bf16), rel=0.05)
    assert counted[1] < 0.53 * counted[0]  # the rest are scales, and what is not of linear layers


def test_the_weights_of_linear_layers_are_float8_unless_tied_to_others() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head, self.body = nn.Embedding(10, 4), nn.Linear(4, 10), nn.Linear(4, 4)
            self.same = nn.Linear(4, 4)
            self.head.weight, self.same.weight = self.emb.weight, self.body.weight
            self.conv = nn.Conv1d(2, 2, 2)

    module = Tied()
    units = wrap.partition(module, lambda _: False)
    assert [p.name for p in float8_weights.marked(module, units)[0].unit.parameters if p.float8] == ["body.weight"]


def test_if_torchao_converted_some_layers_the_others_are_not_float8() -> None:
    module = nn.Sequential(Float8Linear(4, 4), nn.Linear(4, 4))
    units = wrap.partition(module, lambda _: False)
    assert [p.name for p in float8_weights.marked(module, units)[0].unit.parameters if p.float8] == [
        "0.weight",
        "1.weight",
    ]
    module[0].config = _Config()
    assert [p.name for p in float8_weights.marked(module, units)[0].unit.parameters if p.float8] == ["0.weight"]


class WeightWithDynamicFloat8CastTensor(torch.Tensor):
    """As torchao's."""

    _tensor: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, tensor.size(), dtype=tensor.dtype)
        made._tensor = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._tensor)
        args = [a._tensor if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


class _Config:
    enable_fsdp_float8_all_gather = True
    cast_config_weight = None


def as_torchao_converts(model: Model) -> Model:
    for child in model.modules():
        if isinstance(child, Float8Linear):
            child.config = _Config()  # type: ignore[assignment]
            child.weight = nn.Parameter(WeightWithDynamicFloat8CastTensor(child.weight.detach()))
    return model


def test_torchaos_weights_ask_for_float8() -> None:
    def run(world: World, make: Callable[[], Model], precision: Any) -> tuple[list[float], str]:
        model = shard(make(), precision)
        losses = train(model)
        assert all(type(p) is not WeightWithDynamicFloat8CastTensor for p in model.parameters())
        return losses, str(sharded_model(model).runtime._wrapping.spec.precision.param_compression)

    bf16 = MixedPrecision(param_dtype=torch.bfloat16)
    asked = run_threads(lambda world: run(world, lambda: as_torchao_converts(Model()), bf16), 2)
    given = run_threads(
        lambda world: run(world, Model, MixedPrecision(param_dtype=torch.bfloat16, wire_dtype="float8_e4m3")), 2
    )
    assert asked == given
    assert asked[0][1] == str(Float8())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Give wire_dtype='float8_e4m3' to send weights as float8"):
        MixedPrecision(param_dtype=torch.float8_e4m3fn)
    assert MixedPrecision(wire_dtype="float8_e4m3").wire(torch.float32).grad.value == "f32"
    wire = MixedPrecision(param_dtype=torch.bfloat16, wire_dtype="float8_e4m3fn").wire(torch.float32)
    assert (wire.grad.value, wire.param_compression) == ("bf16", Float8(rest_bits=16))
