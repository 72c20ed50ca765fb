"""`TensorParallelAttention` against `nn.MultiheadAttention` and `scaled_dot_product_attention`.

Tests of `parallel/tensor/attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import TensorParallelAttention
from axon_ps.parallel.tensor import full_state_dict, gather_from_group, load_full_state_dict, scatter_to_group
from mock_ranks import close, generator, on_ranks, rand

HIDDEN, HEADS, LENGTH = 24, 12, 6
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def plain(bias: bool = True, **options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(HIDDEN, HEADS, bias=bias, batch_first=True, **options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(rand(*p.shape, seed=50 + i) * 0.3)
    return layer


def check_gradients(layer: TensorParallelAttention, oracle: nn.MultiheadAttention) -> None:
    """Every parameter's gradient, put together, is the oracle's."""
    for kind in ("weight", "bias"):
        grads = [p.full_tensor(kind, p.get_parameter(kind).grad) for p in (layer.query, layer.key, layer.value)]
        close(torch.cat(grads), oracle.get_parameter(f"in_proj_{kind}").grad)
        close(layer.out.full_tensor(kind, layer.out.get_parameter(kind).grad), oracle.out_proj.get_parameter(kind).grad)


@pytest.mark.parametrize(("causal", "sequence_parallel"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_equals_plain_torch(world_size: int, causal: bool, sequence_parallel: bool) -> None:
    oracle, length = plain(), 12
    x = rand(2, length, HIDDEN).requires_grad_()
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    expected, _ = oracle(x, x, x, attn_mask=later if causal else None, need_weights=False)
    (expected * rand(*x.shape, seed=9)).sum().backward()
    expected, expected_grad = expected.detach(), x.grad

    def body(group: ProcessGroup) -> None:
        layer = TensorParallelAttention.from_attention(
            oracle, group, causal=causal, sequence_parallel=sequence_parallel
        )
        x = rand(2, length, HIDDEN).requires_grad_()
        before = group.sequence
        y = gather_from_group(layer(scatter_to_group(x, group, 1)), group, 1) if sequence_parallel else layer(x)
        (y * rand(*y.shape, seed=9)).sum().backward()
        if world_size > 1 and not sequence_parallel:
            assert group.sequence - before == 2  # whatever the number of projections
        close(y, expected)
        close(x.grad, expected_grad)
        check_gradients(layer, oracle)
        back = layer.to_attention().state_dict()
        assert list(back) == list(oracle.state_dict())
        assert all(torch.equal(back[k], v) for k, v in oracle.state_dict().items())

    on_ranks(world_size, body)


def test_masks_and_memory_and_any_leading_shape() -> None:
    oracle = plain()
    memory = rand(3, LENGTH + 2, HIDDEN, seed=1)
    allowed = rand(3, 1, LENGTH, LENGTH + 2, seed=2) > -0.5
    by_head = rand(3, HEADS, LENGTH, LENGTH + 2, seed=3)
    x = rand(3, LENGTH, HIDDEN)

    def expected(mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        mask = mask.expand(3, HEADS, -1, -1).flatten(0, 1)
        result: torch.Tensor = oracle(x, source, source, attn_mask=mask, need_weights=False)[0]
        return result

    def body(group: ProcessGroup) -> None:
        layer = TensorParallelAttention.from_attention(oracle, group)
        close(layer(x, memory, attn_mask=allowed), expected(~allowed, memory))
        close(layer(x, memory, attn_mask=by_head), expected(by_head, memory))
        layer.causal = True
        square = by_head[..., :LENGTH]
        close(layer(x, attn_mask=square), expected(square.masked_fill(LATER, -math.inf), x))
        close(layer(x, attn_mask=allowed[..., :LENGTH]), expected(~allowed[..., :LENGTH] | LATER, x))
        one_batch = layer(x)
        for shape in ((LENGTH, HIDDEN), (1, 1, LENGTH, HIDDEN)):
            close(layer(x[0].reshape(shape)), one_batch[0].reshape(shape))
        assert layer(x[:0]).shape == (0, LENGTH, HIDDEN)
        with pytest.raises(InvalidRequest, match=r"attn_mask is \[3, 6, 6\]; needed is \[\.\.\., 1 or 12 heads"):
            layer(x, attn_mask=by_head[:, 0, :, :LENGTH])

    on_ranks(2, body)


def test_fewer_heads_of_keys_than_of_queries() -> None:
    state = {
        f"{name}.weight": rand(rows, HIDDEN, seed=i) * 0.3
        for i, (name, rows) in enumerate({"query": HIDDEN, "key": 8, "value": 8, "out": HIDDEN}.items())
    }
    x = rand(2, LENGTH, HIDDEN)

    def heads(name: str) -> torch.Tensor:
        return (x @ state[f"{name}.weight"].T).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)

    q, k, v = (heads(name) for name in ("query", "key", "value"))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = attended.transpose(1, 2).flatten(2) @ state["out.weight"].T

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        layer = TensorParallelAttention(
            HIDDEN, HEADS, group, True, bias=False, num_key_value_heads=4, generator=generator()
        )
        load_full_state_dict(layer, state)
        assert all(torch.equal(full_state_dict(layer)[k], v) for k, v in state.items())
        close(layer(x), expected)
        with pytest.raises(InvalidRequest, match="no grouped queries"):
            layer.to_attention()
        layer.dropout = 1e-9  # drops nothing, by the way that dropping takes
        close(layer(x), expected)
        return [p.sum() for p in layer.parameters()]

    for world_size in (1, 2, 4):
        on_ranks(world_size, body)


def test_a_model_may_rotate_queries_and_keys() -> None:
    turn = rand(LENGTH, HIDDEN // HEADS)

    class Rotating(TensorParallelAttention):
        def rotate(self, heads: torch.Tensor) -> torch.Tensor:
            return heads * turn

    x = rand(2, LENGTH, HIDDEN)
    state: dict[str, torch.Tensor] = {}

    def body(group: ProcessGroup) -> torch.Tensor:
        layer = Rotating(HIDDEN, HEADS, group, bias=False, sequence_parallel=True, generator=generator())
        state.update(full_state_dict(layer))
        return gather_from_group(layer(scatter_to_group(x, group, 1)), group, 1).detach()

    got = on_ranks(3, body)[0]
    q, k, v = (
        (x @ state[f"{n}.weight"].T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in ("query", "key", "value")
    )
    attended = functional.scaled_dot_product_attention(q * turn, k * turn, v)
    close(got, attended.transpose(1, 2).flatten(2) @ state["out.weight"].T)


@pytest.mark.parametrize("bias", [True, False])
def test_first_values_are_those_of_plain_torch_from_the_same_seed(bias: bool) -> None:
    torch.manual_seed(3)
    oracle = nn.MultiheadAttention(HIDDEN, HEADS, bias=bias, batch_first=True)
    after = torch.get_rng_state()

    def body(group: ProcessGroup) -> None:
        mine = generator(3)
        layer = TensorParallelAttention(HIDDEN, HEADS, group, bias=bias, generator=mine)
        back = layer.to_attention().state_dict()
        assert all(torch.equal(back[k], v) for k, v in oracle.state_dict().items())
        assert torch.equal(mine.get_state(), after)

    for world_size in (1, 3):
        on_ranks(world_size, body)


def test_padding_that_attends_to_nothing_gives_zeros_with_dropout_too() -> None:
    oracle = plain(dropout=0.4)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    allowed[2] = False

    def body(group: ProcessGroup) -> None:
        layer = TensorParallelAttention.from_attention(oracle, group)
        for mask in (allowed, torch.zeros(LENGTH, LENGTH).masked_fill(~allowed, -math.inf)):
            x = rand(LENGTH, HIDDEN).requires_grad_()
            y = layer(x, attn_mask=mask)
            close(y[2], oracle.out_proj.bias)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.isfinite().all()

    on_ranks(1, body)


def test_what_is_dropped_does_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = plain(dropout=0.4)
    x = rand(2, LENGTH, HIDDEN)
    # Threads share torch's default generator, so the one number drawn from it is given here.
    monkeypatch.setattr("torch.randint", lambda high, size, **_: torch.tensor(high // 3))

    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer = TensorParallelAttention.from_attention(oracle, group, causal=True)
        assert layer.training
        mask = rand(LENGTH, LENGTH, seed=4)
        dropped = layer(x), layer(x, attn_mask=mask), layer(x, attn_mask=mask > 0)
        dropout_mask = layer._dropout_mask(torch.empty(50, HEADS // group.world_size, 20, 20))
        assert dropout_mask.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
        assert dropout_mask.mean().item() == pytest.approx(1.0, abs=0.03)
        assert not torch.equal(dropout_mask[:, 0], dropout_mask[:, 1])
        layer.eval()
        assert (layer(x) - dropped[0]).norm() > 0.1 * dropped[0].norm()
        return dropped

    first = on_ranks(1, body)[0]
    for world_size in (2, 3):
        for got in on_ranks(world_size, body):
            for a, b in zip(got, first, strict=True):
                close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 10, "num_heads": 4}, "hidden_size=10 does not divide into num_heads=4"),
        ({"hidden_size": 12, "num_heads": 3}, "3 heads .* do not divide among 2 ranks"),
        ({"hidden_size": 12, "num_heads": 4, "num_key_value_heads": 1}, "1 heads of keys"),
        ({"hidden_size": 12, "num_heads": 4, "num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": 12, "num_heads": 4, "dropout": 1.0}, "a probability below 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options: dict[str, Any], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match=message):
            TensorParallelAttention(group=group, **options)

    on_ranks(2, body)


def test_attention_that_has_no_counterpart_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match="batch_first=True"):
            TensorParallelAttention.from_attention(nn.MultiheadAttention(8, 2), group)
        for options in ({"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 4}):
            with pytest.raises(InvalidRequest, match="no counterpart"):
                TensorParallelAttention.from_attention(nn.MultiheadAttention(8, 2, batch_first=True, **options), group)

    on_ranks(1, body)
