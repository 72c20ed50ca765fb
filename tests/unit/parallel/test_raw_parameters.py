"""Frozen parameters of every dtype: their bits, class and attributes stay, wherever they are stored or sent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adapted_model import WIDTH, Adapted, Params4bit, adapter_bytes, batch, build, frozen_bits
from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import (
    FSDP,
    AdamW,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    estimate,
    fully_shard,
    load_weights,
    sharded_model,
)
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.storage.export import export_model
from axon_ps.testing import run_threads
from axon_ps.types import DType
from axon_ps.worker.subscription import Weights

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

FLOATS = (DType.BF16, DType.F16, DType.F64)
NOT_WRITTEN = (DType.F4_X2, DType.C32, DType.C128)
STRATEGIES = [s.name for s in ShardingStrategy]


def of_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits, NaN with payloads included; for bool, of its two values."""
    values = torch.Generator().manual_seed(dtype.itemsize)
    numel = torch.Size(shape).numel() * dtype.itemsize
    highest = 2 if dtype is torch.bool else 256
    return torch.randint(0, highest, (numel,), dtype=torch.uint8, generator=values).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


class Scaled(nn.Module):
    """Frozen parameters of one dtype, read in forward, and a trained scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Parameter(of_bytes(dtype, 5, 7), requires_grad=False)
        self.single = nn.Parameter(of_bytes(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.seen: list[tuple[torch.dtype, bytes]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [(p.dtype, bits(p)) for p in (self.base, self.single)]
        return x * self.scale


def trained(model: Any, of: Any, x: torch.Tensor, steps: int = 2) -> None:
    optimizer = AdamW(of, lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_dtype_is_read_and_returned_as_it_was_built(strategy: str) -> None:
    def run(world: World) -> list[tuple[DType, Any, Mapping[str, torch.Tensor], Any]]:
        found = []
        for dtype, built in TORCH_DTYPES.items():
            model = FSDP(Scaled(built), world, sharding_strategy=strategy)
            trained(model, model, torch.ones(4, 3))
            found.append((dtype, model.module.seen, model.state_dict(), dict(model.full_parameters())))
        return found

    for found in run_threads(run, 2):
        for dtype, seen, state, full in found:
            built = Scaled(TORCH_DTYPES[dtype])
            assert seen == [(p.dtype, bits(p)) for p in (built.base, built.single)] * 2
            for name, own in (("base", built.base), ("single", built.single)):
                assert state[name].dtype is full[name].dtype is own.dtype
                assert bits(state[name]) == bits(full[name]) == bits(own)
            assert not torch.equal(state["scale"], built.scale)


@pytest.mark.parametrize("options", [{}, {"cpu_offload": CPUOffload.PARAMS}, {"retain_frozen": False}])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_only_floats_that_are_numbers_compute_in_another_dtype(strategy: str, options: dict[str, Any]) -> None:
    def run(world: World) -> None:
        for dtype, built in TORCH_DTYPES.items():
            module = Scaled(built)
            want = [p.detach().clone() for p in (module.base, module.single)]
            model = FSDP(module, world, sharding_strategy=strategy, mixed_precision=torch.bfloat16, **options)
            model(torch.ones(4, 3)).sum().backward()
            if dtype in (*FLOATS, DType.F32):
                want = [p.to(torch.bfloat16) for p in want]
            for (seen, found), w in zip(module.seen, want, strict=True):
                assert seen is w.dtype
                there = torch.frombuffer(bytearray(found), dtype=seen).view(w.shape)
                assert bits(there) == bits(w) or torch.equal(there.isnan(), w.isnan())

    run_threads(run, 2)


def test_class_and_attributes_of_a_parameter_stay() -> None:
    def run(world: World) -> None:
        module = build("4bit")
        first: Any = module[0]
        state = first.weight.quant_state
        model = FSDP(module, world, unit_types={Adapted})
        assert isinstance(first.weight, Params4bit)
        assert first.weight.quant_state is state
        assert first.weight.shape == (WIDTH * WIDTH // 2, 1)
        with pytest.raises(Misuse):
            first.weight.sum()
        with model.summon_full_params():
            assert isinstance(first.weight, Params4bit)
            same: Any = build("4bit")[0]
            assert torch.equal(first.dequantised(), same.dequantised())
        trained(model, model, batch(0))
        assert first.weight.quant_state is state

    run_threads(run, 2)


class OnMeta(nn.Module):
    """A quantised weight that is made by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Params4bit(torch.empty(6, 1, dtype=torch.uint8, device="meta"), "scales")
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(6, dtype=torch.uint8).view(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.weight.float().sum()


def test_a_parameter_on_the_meta_device_stays_the_object_that_it_is() -> None:
    def run(world: World) -> None:
        module = OnMeta()
        weight = module.weight
        model = FSDP(module, world)
        assert module.weight is weight
        assert isinstance(weight, Params4bit)
        assert weight.quant_state == "scales"
        assert model(torch.ones(1)).item() == 15.0

    run_threads(run, 2)


@pytest.mark.parametrize("saved", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_a_checkpoint_has_the_bits(base: Any, saved: str, tmp_path: Path) -> None:
    def run(world: World) -> dict[str, torch.Tensor]:
        model = FSDP(build(base), world, unit_types={Adapted}, sharding_strategy=saved)
        trained(model, model, batch(0))
        model.save_checkpoint(str(tmp_path))
        world.barrier()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def load(world: World, strategy: str) -> None:
        other = build(base)
        with torch.no_grad():
            for adapted in (m for m in other if isinstance(m, Adapted)):
                adapted.weight.zero_()
        model = FSDP(other, world, unit_types={Adapted}, sharding_strategy=strategy)
        model(batch(0))  # what is retained of the zeros is not used again
        model.load_checkpoint(str(tmp_path))
        state = model.state_dict()
        assert {n: bits(v) for n, v in state.items()} == {n: bits(v) for n, v in want.items()}
        plain = build(base)
        for values in (state, {n: v + 1 for n, v in state.items()}):
            model.load_state_dict(values)
            plain.load_state_dict(values)
            torch.testing.assert_close(model(batch(1)), plain(batch(1)))

    want = run_threads(run, 2)[0]
    assert frozen_bits(want) == frozen_bits(build(base).state_dict())
    for strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"):
        run_threads(load, 2, shards=2, args=(strategy,))
    export_model(str(tmp_path), str(tmp_path / "model.safetensors"))
    exported = load_file(tmp_path / "model.safetensors")
    assert {n: (v.dtype, bits(v)) for n, v in exported.items()} == {n: (v.dtype, bits(v)) for n, v in want.items()}
    export_model(str(tmp_path), str(tmp_path / "model.safetensors"), "f32")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert value.dtype is (torch.uint8 if want[name].dtype is torch.uint8 else torch.float32)
        assert torch.equal(value, want[name].to(value.dtype))


def test_exports_have_the_dtypes_that_safetensors_has(tmp_path: Path) -> None:
    def run(world: World) -> None:
        models = [FSDP(Scaled(built), world, name=dtype.value) for dtype, built in TORCH_DTYPES.items()]
        models[0].save_checkpoint(str(tmp_path))

    run_threads(run, 1)
    for dtype, built in TORCH_DTYPES.items():
        if dtype in NOT_WRITTEN:
            with pytest.raises(InvalidRequest, match="which safetensors has not"):
                export_model(str(tmp_path), str(tmp_path / "x.safetensors"), model=dtype.value)
        else:
            export_model(str(tmp_path), str(tmp_path / "x.safetensors"), model=dtype.value)
            if dtype is not DType.F8_E8M0:  # safetensors' own library for torch has no name for it
                exported = load_file(tmp_path / "x.safetensors")
                assert (exported["base"].dtype, bits(exported["base"])) == (built, bits(Scaled(built).base))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_may_be_frozen_or_trained_after_a_restore(frozen: bool, tmp_path: Path) -> None:
    """It becomes raw, or is raw no longer; its values stay."""

    def made(requires_grad: bool) -> nn.Module:
        module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).to(torch.bfloat16)
        with torch.no_grad():
            for seed, p in enumerate(module.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        return module.requires_grad_(requires_grad)

    def saved(world: World) -> dict[str, torch.Tensor]:
        model = FSDP(made(not frozen), world)
        model.save_checkpoint(str(tmp_path))
        world.barrier()
        return dict(model.state_dict())

    def load(world: World) -> dict[str, torch.Tensor]:
        model = FSDP(made(frozen), world)
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        model.load_checkpoint(str(tmp_path))
        return dict(model.state_dict())

    want = run_threads(saved, 2)[0]
    for state in run_threads(load, 2, shards=2):
        assert {n: bits(v) for n, v in state.items()} == {n: bits(v) for n, v in want.items()}


@pytest.mark.parametrize("face", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_a_step_of_adapters_moves_their_bytes_and_none_of_the_base(face: str, base: Any) -> None:
    def run(world: World) -> None:
        module: Any = build(base)
        wanted = adapter_bytes(module)
        if face == "FSDP":
            model = whole = FSDP(module, world, unit_types={Adapted}, sharding_strategy="FULL_SHARD", prefetch=False)
            optimizer: Any = AdamW(model, lr=1e-3)
        else:
            for child in module[:-1]:
                fully_shard(child)
            model = fully_shard(module)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            whole = sharded_model(model)
        counted = []
        for step in range(20):
            model(batch(step)).square().mean().backward()
            world.barrier()
            counted.append(whole.statistics()["wire_bytes_in"])
            whole.clip_grad_norm(1e9)  # so that nothing is gathered before the step is decided
            optimizer.step()
            optimizer.zero_grad()
            assert whole.statistics()["pushed_bytes"] == (step + 1) * wanted
        received = [after - before for before, after in itertools.pairwise(counted)]
        assert sum(received) == pytest.approx(len(received) * wanted, rel=0.01)
        assert frozen_bits(whole.state_dict()) == frozen_bits(build(base).state_dict())

    run_threads(run, 3, shards=2)


@pytest.mark.parametrize("blocks", [2, 16, 40])
def test_a_step_gathers_and_takes_what_was_estimated(blocks: int) -> None:
    """Adapters that fit into two units and an eighth of the base are gathered once; others are gathered twice."""

    def run(world: World) -> tuple[int, int, Any, float, int]:
        expected = estimate(build("bf16", blocks), world, unit_types={Adapted}).of(ShardingStrategy.FULL_SHARD)
        model = FSDP(build("bf16", blocks), world, unit_types={Adapted}, prefetch=False)
        optimizer = AdamW(model, lr=1e-3)
        counted: list[int] = []
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.append(int(model.statistics()["wire_bytes_in"]))
        peak = model.statistics()["peak_param_memory_bytes"]
        adapters, estimated = adapter_bytes(build("bf16", blocks)), model.memory_estimate().param_memory_bytes
        return counted[2] - counted[1], adapters, expected, peak, estimated

    results = run_threads(run, 2)
    received, adapters, expected, peak, estimated = results[0]
    assert sum(result[0] for result in results) == expected.received_bytes
    assert peak == pytest.approx(estimated, rel=0.1)
    assert received == adapters if blocks < 40 else received > adapters


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_adapters_are_cast_or_compressed_and_the_base_is_not(base: Any, strategy: str) -> None:
    def run(world: World, wire: Any) -> None:
        precision = MixedPrecision(param_dtype=torch.bfloat16, wire_dtype=wire)
        model = FSDP(build(base), world, unit_types={Adapted}, sharding_strategy=strategy, mixed_precision=precision)
        trained(model, model, batch(0), steps=4)
        plain = build(base)
        trained_plain(plain, batch(0), steps=4)
        state = model.state_dict()
        assert frozen_bits(state) == frozen_bits(plain.state_dict())
        for name, p in plain.named_parameters() if wire != "int4" else ():
            assert (state[name] - p).float().norm() <= 0.3 * p.float().norm(), (wire, name)

    for wire in (None, "int8", "int4") if strategy != "NO_SHARD" else (None,):
        run_threads(run, 2, shards=2, args=(wire,))


def trained_plain(model: nn.Module, x: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_base_that_is_not_retained_is_gathered_for_each_use() -> None:
    def run(world: World, retain: bool) -> tuple[float, float]:
        model = FSDP(build("bf16"), world, unit_types={Adapted}, retain_frozen=retain)
        trained(model, model, batch(0), steps=4)
        statistics = model.statistics()
        return statistics["gathered_bytes"], statistics["peak_param_memory_bytes"]

    (retained, more), (again, less) = (run_threads(run, 2, args=(retain,))[0] for retain in (True, False))
    assert retained < again / 2
    assert less < more == pytest.approx(adapter_bytes(build("bf16")) + 4 * 2 * WIDTH * WIDTH, rel=0.01)


def test_an_average_of_models_copies_raw_parameters_or_leaves_them() -> None:
    def run(world: World, strategy: str) -> None:
        one, other = (FSDP(build("4bit"), world, name=n, sharding_strategy=strategy) for n in ("one", "other"))
        want = {n: v + 1 if v.dtype is torch.uint8 else v for n, v in other.state_dict().items()}
        other.load_state_dict(want)
        one.copy_from(other, 0.5)
        assert frozen_bits(one.state_dict()) == frozen_bits(build("4bit").state_dict())
        one.copy_from(other, 1.0)
        assert frozen_bits(one.state_dict()) == frozen_bits(want)

    for strategy in ("FULL_SHARD", "NO_SHARD"):
        run_threads(run, 2, args=(strategy,))


def test_weights_of_a_subscription_are_loaded_as_their_bits() -> None:
    for built in (torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.uint8, torch.float64):
        module, other = Scaled(built), Scaled(built)
        with torch.no_grad():
            other.base.view(torch.uint8).zero_()
        arrays = {
            name: p.detach().reshape(-1).view(torch.uint8).numpy().view(dtype.numpy).reshape(p.shape)
            for name, p in module.named_parameters()
            for dtype in (next(ours for ours, theirs in TORCH_DTYPES.items() if theirs is p.dtype),)
        }
        assert load_weights(other, Weights(3, arrays)) == 3
        assert bits(other.base) == bits(module.base)
        assert bits(other.single) == bits(module.single)


def test_a_dtype_that_cannot_be_trained_is_refused_by_name() -> None:
    def run(world: World) -> None:
        module = Scaled(torch.complex64)
        module.base.requires_grad_()
        with pytest.raises(InvalidRequest, match=r"'base' has dtype torch.complex64; a trainable one can be one of"):
            FSDP(module, world)
        quantised = Scaled(torch.uint8)
        quantised.base = nn.Parameter(torch.empty(3, dtype=torch.bits8), requires_grad=False)
        with pytest.raises(InvalidRequest, match=r"torch.bits8, which cannot be sharded: view it as torch.uint8"):
            FSDP(quantised, world)

    run_threads(run, 1)
