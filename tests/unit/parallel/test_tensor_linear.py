"""Tensor-parallel linear layers against `nn.Linear`: values, gradients, first values, conversion, errors.

Tests of `parallel/tensor/linear.py`, `parallel/tensor/projection.py`, `parallel/tensor/module.py`,
`parallel/tensor/state.py`, `parallel/tensor/optimizer_state.py`, `parallel/tensor/clip.py` and
`parallel/by_reference.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest, LayoutMismatch, MemberLost
from axon_ps.parallel import ColumnParallelLinear, RowParallelLinear, clip_grad_norm
from axon_ps.parallel.mesh import Mesh
from axon_ps.parallel.tensor import (
    Partition,
    full_optimizer_state_dict,
    full_state_dict,
    gather_from_group,
    grad_norm,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    local_state_dict,
    scatter_to_group,
    sum_gradients,
)
from axon_ps.parallel.tensor.partition import draw_uniform_
from mock_ranks import close, generator, on_ranks, rand

SHAPES = [(6,), (4, 6), (2, 3, 4, 6)]


def plain(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(rand(*p.shape, seed=50 + i))
    return layer


def run(layer: nn.Module, x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input gradient of a loss that weighs every output differently."""
    x = x.clone().requires_grad_()
    y = layer(x, *arguments)
    (y * rand(*y.shape, seed=9)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_equals_plain_torch(kind: Any, bias: bool, world_size: int) -> None:
    oracle = plain(6, 7, bias)  # neither 6 nor 7 divides among 4
    expected = [run(oracle, rand(*shape)) for shape in SHAPES]  # gradients add up

    def body(group: ProcessGroup) -> None:
        layer = kind.from_linear(oracle, group)
        for shape, (y, grad) in zip(SHAPES, expected, strict=True):
            got, got_grad = run(layer, rand(*shape))
            close(got, y)
            close(got_grad, grad)
        for name, p in oracle.named_parameters():
            own = layer.get_parameter(name)
            close(layer.full_tensor(name, own.grad), p.grad)
            close(own.grad, layer.shard_of(name, p.grad))
        assert sum(p.numel() for p in layer.parameters()) <= (49 if world_size == 1 else 35)
        back = layer.to_linear()
        assert all(torch.equal(a, b) for a, b in zip(back.parameters(), oracle.parameters(), strict=True))

    on_ranks(world_size, body)


class MLP(nn.Module):
    """A norm and two layers; with sequence parallelism everything outside the pair has a shard of the sequence."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_mlp_equals_plain_torch(world_size: int, sequence_parallel: bool) -> None:
    oracle = MLP(plain(8, 32), plain(32, 8))
    expected, expected_grad = run(oracle, rand(2, 12, 8))

    def body(group: ProcessGroup) -> None:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        model = MLP(
            ColumnParallelLinear.from_linear(oracle.up, group, gather_output=False, **options),
            RowParallelLinear.from_linear(oracle.down, group, input_is_parallel=True, **options),
        )
        x = rand(2, 12, 8).requires_grad_()
        if sequence_parallel:
            sum_gradients(model.norm, group)
            y = gather_from_group(model(scatter_to_group(x, group, 1)), group, 1)
        else:
            y = model(x)
        forward = group.sequence
        (y * rand(*y.shape, seed=9)).sum().backward()
        if world_size > 1:
            # f and g; or in forward scatter, gather and gather; in backward the pair's two and the gather again, the
            # input, the bias and the norm's two parameters
            assert (forward, group.sequence) == ((3, 3 + 3 + 1 + 1 + 2) if sequence_parallel else (1, 2))
        close(y, expected)
        close(x.grad, expected_grad)
        for name, p in oracle.named_parameters():
            holder, _, last = name.rpartition(".")
            layer, own = model.get_submodule(holder), model.get_parameter(name)
            close(own.grad, p.grad if holder == "norm" else layer.shard_of(last, p.grad))

    on_ranks(world_size, body)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_of_parts_of_a_sequence_may_be_whole_on_its_other_side(kind: Any) -> None:
    oracle = plain(6, 4)
    expected, expected_grad = run(oracle, rand(4, 6))

    def body(group: ProcessGroup) -> None:
        layer = kind.from_linear(oracle, group, sequence_parallel=True, sequence_dim=0)
        column = kind is ColumnParallelLinear
        x = rand(4, 6).requires_grad_()
        y = layer(scatter_to_group(x, group, 0) if column else x)
        y = y if column else gather_from_group(y, group, 0)
        (y * rand(*y.shape, seed=9)).sum().backward()
        close(y, expected)
        close(x.grad, expected_grad)

    on_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_first_values_are_those_of_plain_torch_from_the_same_seed(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    oracles = [nn.Linear(5, 11, dtype=dtype), nn.Linear(11, 3, bias=False, dtype=dtype)]
    after = torch.get_rng_state()

    def body(group: ProcessGroup) -> torch.Tensor:
        mine = generator(7)
        options: dict[str, Any] = {"group": group, "generator": mine, "dtype": dtype}
        layers = [ColumnParallelLinear(5, 11, **options), RowParallelLinear(11, 3, False, **options)]
        for layer, oracle in zip(layers, oracles, strict=True):
            for a, b in zip(layer.to_linear().parameters(), oracle.parameters(), strict=True):
                assert a.dtype is b.dtype
                assert torch.equal(a, b)
        late = ColumnParallelLinear(5, 11, group=group, dtype=dtype, device="meta")
        assert late.weight.is_meta
        late.to_empty(device="cpu").reset_parameters(generator(7))
        assert all(torch.equal(a, b) for a, b in zip(late.parameters(), layers[0].parameters(), strict=True))
        return mine.get_state()

    for world_size in (1, 3, 4):
        assert all(torch.equal(state, after) for state in on_ranks(world_size, body))


def test_a_matrix_is_drawn_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.parallel.tensor.partition._DRAWN_NUMEL", 14)  # two rows of seven
    full = torch.empty(9, 7).uniform_(-0.5, 0.5, generator=generator())
    for dim, size in ((0, 9), (1, 7)):
        for index in range(4):
            partition = Partition(dim, size, 4, index)
            shard = torch.full_like(partition.shard_of(full), torch.nan)
            draw_uniform_(shard, 0.5, partition, generator())
            assert torch.equal(shard, partition.shard_of(full))


def test_frozen_layers_stay_frozen_and_need_no_gradient() -> None:
    oracle = plain(6, 4).requires_grad_(False)
    oracle.weight.requires_grad_()

    def body(group: ProcessGroup) -> None:
        layer = RowParallelLinear.from_linear(oracle, group, sequence_parallel=True)
        assert (layer.weight.requires_grad, layer.bias.requires_grad) == (True, False)
        layer(rand(4, 6)).sum().backward()
        assert layer.bias.grad is None
        back = layer.to_linear()
        assert (back.weight.requires_grad, back.bias.requires_grad) == (True, False)

    on_ranks(2, body)


def test_whole_state_dicts_load_at_any_size_of_the_group() -> None:
    oracle = MLP(plain(8, 10), plain(10, 8))

    def build(group: ProcessGroup) -> MLP:
        return MLP(
            ColumnParallelLinear(8, 10, group=group, gather_output=False, generator=generator(1)),
            RowParallelLinear(10, 8, group=group, input_is_parallel=True, generator=generator(2)),
        )

    def body(group: ProcessGroup) -> None:
        model = build(group)
        load_full_state_dict(model, oracle.state_dict())
        close(model(rand(3, 8)), oracle(rand(3, 8)))
        shards = copy.deepcopy(model).state_dict()  # of a copy, which is in the same group
        for full in (full_state_dict(model), full_state_dict(build(group), shards)):
            assert list(full) == list(oracle.state_dict())
            assert all(torch.equal(full[k], v) for k, v in oracle.state_dict().items())
        with pytest.raises(LayoutMismatch, match=r"'up.weight' of the state dict is \[4, 8\].*\[10, 8\]"):
            load_full_state_dict(model, {**oracle.state_dict(), "up.weight": torch.zeros(4, 8)})
        with pytest.raises(RuntimeError, match="Missing key"):
            load_full_state_dict(model, {"up.bias": torch.zeros(10)})
        assert local_state_dict(model, {"other": 1}) == {"other": 1}

    for world_size in (1, 2, 3):
        on_ranks(world_size, body)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_the_norm_counts_every_parameter_once(norm_type: float) -> None:
    stages = [MLP(plain(8, 10), plain(10, 8)) for _ in range(2)]
    for i, p in enumerate(p for s in stages for p in s.parameters()):
        p.grad = rand(*p.shape, seed=i)
    grads = {
        (i, n): p.grad.clone() for i, s in enumerate(stages) for n, p in s.named_parameters() if p.grad is not None
    }
    everything = [p for s in stages for p in s.parameters()]
    tied = stages[1].norm.bias
    expected = nn.utils.get_total_norm([p.grad for p in everything if p is not tied], norm_type)
    nn.utils.clip_grad_norm_(everything, 0.5, norm_type)

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, pipeline=2, data=1, tensor=2)
        tensor, stage = mesh.group("tensor"), mesh.coordinate("pipeline")
        model = MLP(
            ColumnParallelLinear.from_linear(stages[stage].up, tensor, gather_output=False),
            RowParallelLinear.from_linear(stages[stage].down, tensor, input_is_parallel=True),
        )
        for name, p in model.named_parameters():
            holder, _, last = name.rpartition(".")
            layer, full = model.get_submodule(holder), grads[stage, name]
            p.grad = (full if holder == "norm" else layer.shard_of(last, full)).clone()
        elsewhere = [model.norm.bias] if stage else []
        norm = grad_norm(model, norm_type=norm_type, mesh=mesh, counted_elsewhere=elsewhere)
        close(norm, expected, 1e-6)
        clip_grad_norm([model], 0.5, norm_type=norm_type, mesh=mesh)
        for name, p in model.named_parameters():
            holder, _, last = name.rpartition(".")
            layer, full = model.get_submodule(holder), stages[stage].get_parameter(name).grad
            close(p.grad, full if holder == "norm" else layer.shard_of(last, full))

    on_ranks(4, body)


def test_what_cannot_be_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match="0 to 4 features"):
            ColumnParallelLinear(0, 4, group=group)
        layer = RowParallelLinear(4, 4, group=group, sequence_parallel=True, generator=generator())
        with pytest.raises(InvalidRequest, match=r"dimension -2 of \[2, 3, 4\] .* does not divide among 2 ranks"):
            layer(rand(2, 3, 4))
        column = ColumnParallelLinear(4, 4, group=group, sequence_parallel=True, generator=generator())
        with pytest.raises(Disagreement):
            column(rand(2 + group.rank, 4))
        with pytest.raises(InvalidRequest, match="must be positive"):
            clip_grad_norm(layer, 1.0, norm_type=0.0)

    on_ranks(2, body)
    with pytest.raises(axon_ps.errors.Misuse, match="no current world"):
        ColumnParallelLinear(4, 4)


def test_of_a_sequence_only_the_own_part_is_kept_for_backward() -> None:
    def body(group: ProcessGroup) -> None:
        layer = ColumnParallelLinear(
            8, 8, group=group, gather_output=False, sequence_parallel=True, generator=generator()
        )
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            layer(rand(3, 8).requires_grad_())
        assert saved == [(3, 8), (4, 8)]

    on_ranks(2, body)


def test_under_autocast_low_precision_travels() -> None:
    up, down = plain(8, 32), plain(32, 8)
    x = rand(2, 6, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = down(up(x))
    (expected * rand(2, 6, 8, seed=9)).sum().backward()

    def body(group: ProcessGroup) -> None:
        for sequence_parallel, travelled in ((False, ["bf16"] * 2), (True, ["bf16"] * 2 + ["f32"] + ["bf16"] * 3)):
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
            mine_up = ColumnParallelLinear.from_linear(up, group, gather_output=False, **options)
            mine_down = RowParallelLinear.from_linear(down, group, input_is_parallel=True, **options)
            mine = slice(3 * group.rank, 3 * group.rank + 3) if sequence_parallel else slice(None)
            own = rand(2, 6, 8)[:, mine].clone().requires_grad_()
            before = len(group.calls.recorder.entries())
            with torch.autocast("cpu", torch.bfloat16):
                y = mine_down(mine_up(own))
            (y * rand(2, 6, 8, seed=9)[:, mine]).sum().backward()
            assert [e.call.dtype.value for e in group.calls.recorder.entries()[before:]] == travelled  # f32: the bias
            close(y.float(), expected[:, mine].float(), 2e-2)
            assert x.grad is not None
            close(own.grad, x.grad[:, mine], 2e-2)
            assert mine_up.weight.grad is not None
            assert mine_up.weight.grad.dtype is torch.float32

    on_ranks(2, body)


def test_checkpointed_activations_are_computed_again() -> None:
    oracle = MLP(plain(8, 32), plain(32, 8))
    expected, expected_grad = run(oracle, rand(2, 6, 8))

    def body(group: ProcessGroup) -> None:
        model = MLP(
            ColumnParallelLinear.from_linear(oracle.up, group, gather_output=False),
            RowParallelLinear.from_linear(oracle.down, group, input_is_parallel=True),
        )
        x = rand(2, 6, 8).requires_grad_()
        y = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
        (y * rand(*y.shape, seed=9)).sum().backward()
        close(y, expected)
        close(x.grad, expected_grad)

    on_ranks(2, body)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(rand(3, 8, seed=step)).tanh().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_on_with_another_number_of_ranks(kind: Any) -> None:
    options: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    oracle = MLP(plain(8, 10), plain(10, 8))
    initial = copy.deepcopy(oracle.state_dict())
    train(oracle, kind(oracle.parameters(), **options), range(6))
    saved: dict[str, Any] = {"model": initial}

    def build(group: ProcessGroup) -> tuple[MLP, torch.optim.Optimizer]:
        model = MLP(
            ColumnParallelLinear(8, 10, group=group, gather_output=False, generator=generator(1)),
            RowParallelLinear(10, 8, group=group, input_is_parallel=True, generator=generator(2)),
        )
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        matrices = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        return model, kind([{"params": matrices}, {"params": biases}], **options)

    def stretch(steps: range) -> Any:
        def body(group: ProcessGroup) -> dict[str, Any]:
            model, optimizer = build(group)
            load_full_state_dict(model, saved["model"])
            if "optimizer" in saved:
                load_full_optimizer_state_dict(model, optimizer, saved["optimizer"])
            train(model, optimizer, steps)
            return {
                "model": copy.deepcopy(full_state_dict(model)),
                "optimizer": full_optimizer_state_dict(model, optimizer),
            }

        return body

    for world_size, steps in ((2, range(2)), (3, range(2, 4)), (1, range(4, 6))):
        saved = on_ranks(world_size, stretch(steps))[0]
    for name, value in oracle.state_dict().items():
        close(saved["model"][name], value)
    assert saved["optimizer"]["param_groups"][1]["params"] == ["norm.bias", "up.bias", "down.bias"]


def test_optimizer_state_of_other_parameters_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = RowParallelLinear(4, 6, group=group, generator=generator())
        optimizer = torch.optim.Adam(model.parameters())
        state = full_optimizer_state_dict(model, optimizer)
        with pytest.raises(InvalidRequest, match="a parameter that the model has not"):
            full_optimizer_state_dict(nn.Linear(2, 2), optimizer)
        wrong = {**state, "param_groups": [{**state["param_groups"][0], "params": ["weight"]}]}
        with pytest.raises(LayoutMismatch, match="of other parameters"):
            load_full_optimizer_state_dict(model, optimizer, wrong)
        wrong = {**state, "state": {"weight": {"exp_avg": torch.zeros(6, 2)}}}
        with pytest.raises(LayoutMismatch, match=r"exp_avg of 'weight' is \[6, 2\]; the full one has \[6, 4\]"):
            load_full_optimizer_state_dict(model, optimizer, wrong)
        with pytest.raises(axon_ps.errors.Misuse, match="init_process_group"):
            Mesh(group, tensor=2).device_mesh()

    on_ranks(2, body)


def test_a_rank_that_goes_ends_the_backward_of_the_others() -> None:
    def body(group: ProcessGroup) -> None:
        layer = ColumnParallelLinear(4, 4, group=group, gather_output=False, generator=generator())
        y = layer(rand(2, 4).requires_grad_())
        group.barrier()
        if group.rank:
            group.abort(MemberLost("rank 1 has left"))
            return
        with pytest.raises(MemberLost, match="rank 1 has left"):
            y.sum().backward()

    on_ranks(2, body)
