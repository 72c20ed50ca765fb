"""`TensorParallelAttention`: multi-head attention with its heads split among the ranks of a group.

Rank i projects the input to queries, keys and values of its heads alone, attends, and multiplies by its columns of the
output projection. The result is the sum over the ranks. Self-attention takes one all-reduce in forward and
one in backward, for any number of heads (Shoeybi et al. 2019, section 3).

Note: [Dropout by head]
Each head draws its dropout mask from a generator of its own, seeded by one number from torch's default host generator
and the head's index among all heads. So each rank has masks of its own, and a model has the same masks with any number
of ranks. Dropout takes the matrix of probabilities in memory, so it does not use the fused kernels. Without dropout,
and in evaluation, `scaled_dot_product_attention` is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from axon_ps.parallel.tensor.module import TensorParallelModule
from axon_ps.parallel.tensor.partition import draw_uniform_
from axon_ps.parallel.tensor.projection import project


class TensorParallelAttention(TensorParallelModule):
    """Self- or cross-attention over [..., sequence, hidden_size], with the heads split among the ranks.

    Args:
        hidden_size: of inputs and output.
        num_heads: of the full layer; a multiple of the number of ranks, and a divisor of `hidden_size`.
        group: the ranks; None = all workers of the current world.
        causal: True = no position attends to a later one.
        dropout: probability with which an attention probability is dropped in training. See Note: [Dropout by head].
        bias: True = the four projections have one.
        num_key_value_heads: heads of keys and values, each used by as many query heads (grouped-query attention); None
            = `num_heads`. A multiple of the number of ranks too.
        sequence_parallel: True = input and output are this rank's equal shard of the sequence.
        device: of the parameters.
        dtype: of the parameters, or its name.
        generator: draws first values; None = torch's default one (see `reset_parameters`).

    Attributes:
        query, key, value: `ColumnParallelLinear`s with this rank's heads.
        out: the `RowParallelLinear` behind them.

    Raises:
        InvalidRequest: heads or sizes do not divide, or `dropout` is not a probability.
        Misuse: as for `TensorParallelModule`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        group: ProcessGroup | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        num_key_value_heads: int | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(group)
        kv_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check(hidden_size, num_heads, kv_heads, dropout, self._world_size)
        self.hidden_size, self.num_heads, self.num_key_value_heads = hidden_size, num_heads, kv_heads
        self.head_size = hidden_size // num_heads
        self.causal, self.dropout, self.sequence_parallel = causal, dropout, sequence_parallel
        common: dict[str, Any] = {"bias": bias, "group": self.group, "sequence_parallel": sequence_parallel}
        common |= {"device": "meta", "dtype": dtype}  # so that first values are drawn once, below
        kv_size = kv_heads * self.head_size
        self.query = ColumnParallelLinear(hidden_size, hidden_size, gather_output=False, **common)
        self.key = ColumnParallelLinear(hidden_size, kv_size, gather_output=False, **common)
        self.value = ColumnParallelLinear(hidden_size, kv_size, gather_output=False, **common)
        self.out = RowParallelLinear(hidden_size, hidden_size, input_is_parallel=True, **common)
        # First values have the bounds of nn.MultiheadAttention (Xavier over the three matrices as one, no bias).
        fan_out = hidden_size + 2 * kv_size
        for projection in (self.query, self.key, self.value):
            projection.weight_bound = math.sqrt(3.0) * math.sqrt(2.0 / (hidden_size + fan_out))
            projection.bias_bound = 0.0
        self.out.bias_bound = 0.0
        self.to_empty(device=device or torch.get_default_device())
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw this rank's shard of the first values that `nn.MultiheadAttention` has from the same seed on the CPU.

        Args:
            generator: a host generator, in the same state on all ranks; None = torch's default one.
        """
        self.out.reset_parameters(generator)
        if self.out.bias is not None:  # nn.MultiheadAttention draws it as nn.Linear does, and then sets it to zero
            draw_uniform_(self.out.bias, 1.0, None, generator)
            nn.init.zeros_(self.out.bias)
        for projection in (self.query, self.key, self.value):
            projection.reset_parameters(generator)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, *, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend. Collective over the group, here and in backward.

        Args:
            x: [..., sequence, hidden_size], replicated; with `sequence_parallel` this rank's shard of the sequence.
            memory: the source of keys and values; None = x. It is sharded like x.
            attn_mask: broadcastable to [..., num_heads, sequence, memory's sequence], the full one on every rank; bool
                (True = attends) or added to the scores, as for `scaled_dot_product_attention`.

        Returns:
            As x.

        Raises:
            InvalidRequest: the mask is of another number of heads.
            Disagreement: with `sequence_parallel`, the ranks' shards of the sequence differ.

        After an error: see `ProcessGroup`.
        """
        attn_mask = self._own_heads(attn_mask)
        dim = -2 if self.sequence_parallel else None
        key_value = [self.key.matrix, self.value.matrix]
        if memory is None:
            query, key, value = project(x, self.group, [self.query.matrix, *key_value], dim)
        else:
            (query,), (key, value) = (
                project(source, self.group, matrices, dim)
                for source, matrices in ((x, [self.query.matrix]), (memory, key_value))
            )
        query, key, value = self.rotate(self._heads(query)), self.rotate(self._heads(key)), self._heads(value)
        attended = self._attend(query, key, value, attn_mask)
        y: torch.Tensor = self.out(attended.transpose(-3, -2).flatten(-2))
        return y

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Return queries or keys as they are, before they are multiplied. Override it for rotary embeddings.

        Args:
            heads: [..., this rank's heads, sequence, head_size], of the full sequence.

        Returns:
            The same shape.
        """
        return heads

    def _heads(self, features: torch.Tensor) -> torch.Tensor:
        """Reshape [..., sequence, this rank's features] to [..., this rank's heads, sequence, head_size]."""
        heads = features.size(-1) // self.head_size
        return features.reshape(*features.shape[:-1], heads, self.head_size).transpose(-3, -2)

    def _own_heads(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the rows of a mask for this rank's heads."""
        if mask is None or mask.dim() < 3 or mask.size(-3) == 1:
            return mask
        if mask.size(-3) != self.num_heads:
            raise InvalidRequest(
                f"attn_mask is {list(mask.shape)}; needed is [..., 1 or {self.num_heads} heads, sequence, sequence]"
            )
        return self._partition(mask.dim() - 3, self.num_heads).shard_of(mask)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend; return [..., this rank's heads, sequence, head_size]."""
        causal, drops = self.causal, self.training and self.dropout > 0.0
        times = self.num_heads // self.num_key_value_heads
        if causal and (drops or mask is not None):
            causal, mask = False, _not_later(query.size(-2), key.size(-2), query.device, mask)
        if not drops:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=times > 1
            )
        if times > 1:
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(self.head_size)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        # A position that attends to nothing (padding) gives zeros, as in scaled_dot_product_attention, and no NaN.
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        probabilities = functional.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
        return (probabilities * self._dropout_mask(probabilities)) @ value

    def _dropout_mask(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return 0 for dropped elements and 1 / (1 - dropout) for the others. See Note: [Dropout by head]."""
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        mask = torch.empty_like(probabilities)
        generator = torch.Generator(mask.device)
        heads = mask.size(-3)
        for i in range(heads):
            generator.manual_seed(seed + self._rank * heads + i)
            mask.select(-3, i).bernoulli_(1.0 - self.dropout, generator=generator)
        return mask.div_(1.0 - self.dropout)

    @classmethod
    def from_attention(
        cls, attention: nn.MultiheadAttention, group: ProcessGroup | None = None, **options: Any
    ) -> TensorParallelAttention:
        """Shard a layer that every rank has. The parameters are copies, frozen where the layer's are.

        Masks mean the opposite there: `nn.MultiheadAttention` takes True for "does not attend".

        Args:
            attention: the same on every rank, with `batch_first`.
            group: the ranks; None = all workers of the current world.
            options: as for the constructor (`causal`, `sequence_parallel`).

        Raises:
            InvalidRequest: it is not batch first, has other sizes for keys or values, `bias_k`, or `add_zero_attn`;
                or as for the constructor.
        """
        if not attention.batch_first:
            raise InvalidRequest("the attention takes [sequence, batch, hidden]; build it with batch_first=True")
        if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
            raise InvalidRequest("attention with kdim, vdim, add_bias_kv or add_zero_attn has no counterpart here")
        bias, options = attention.in_proj_bias, {"dropout": attention.dropout} | options
        layer = cls(attention.embed_dim, attention.num_heads, group, bias=bias is not None, device="meta", **options)
        for i, projection in enumerate((layer.query, layer.key, layer.value)):
            rows = slice(i * attention.embed_dim, (i + 1) * attention.embed_dim)
            projection._set_shard("weight", _rows_of(attention.in_proj_weight, rows))
            projection._set_shard("bias", _rows_of(bias, rows))
        layer.out._set_shard("weight", attention.out_proj.weight)
        layer.out._set_shard("bias", attention.out_proj.bias)
        layer.train(attention.training)
        return layer

    def to_attention(self) -> nn.MultiheadAttention:
        """Return the full layer, on every rank, with `batch_first`, not causal by itself. Collective over the group.

        Raises:
            InvalidRequest: it has fewer heads of keys than of queries, and that class does not support this.
        """
        if self.num_key_value_heads != self.num_heads:
            raise InvalidRequest("nn.MultiheadAttention has no grouped queries; use full_state_dict()")
        bias = self.out.bias is not None
        attention = nn.MultiheadAttention(
            self.hidden_size, self.num_heads, self.dropout, bias, batch_first=True, device="meta"
        )
        projections = (self.query, self.key, self.value)
        attention.in_proj_weight = _joined(
            [p.full_tensor("weight") for p in projections], self.query.weight.requires_grad
        )
        attention.out_proj.weight = _joined([self.out.full_tensor("weight")], self.out.weight.requires_grad)
        if self.query.bias is not None and self.out.bias is not None:
            attention.in_proj_bias = _joined(
                [p.full_tensor("bias") for p in projections], self.query.bias.requires_grad
            )
            attention.out_proj.bias = _joined([self.out.full_tensor("bias")], self.out.bias.requires_grad)
        return attention.train(self.training)

    def extra_repr(self) -> str:
        """Describe the layer for `repr`."""
        return f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, shard={self._rank} of {self._world_size}"


def _not_later(length: int, memory: int, device: torch.device, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a mask by which no position attends to a later one, combined with `mask` if there is one."""
    earlier = torch.ones(length, memory, dtype=torch.bool, device=device).tril()
    if mask is None:
        return earlier
    return mask & earlier if mask.dtype is torch.bool else mask.masked_fill(~earlier, -math.inf)


def _check(hidden_size: int, num_heads: int, kv_heads: int, dropout: float, ranks: int) -> None:
    if num_heads < 1 or hidden_size < 1 or hidden_size % num_heads:
        raise InvalidRequest(f"hidden_size={hidden_size} does not divide into num_heads={num_heads} heads")
    if kv_heads < 1 or num_heads % kv_heads:
        raise InvalidRequest(f"num_heads={num_heads} is no multiple of num_key_value_heads={kv_heads}")
    if num_heads % ranks or kv_heads % ranks:
        raise InvalidRequest(
            f"{num_heads} heads with {kv_heads} heads of keys and values do not divide among {ranks} ranks: every step "
            "would wait for the rank with most; use a group whose size divides both"
        )
    if not 0.0 <= dropout < 1.0:
        raise InvalidRequest(f"dropout is {dropout}; it is a probability below 1")


def _rows_of(full: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return some rows, with requires_grad as of the full tensor."""
    return None if full is None else full.detach()[rows].requires_grad_(full.requires_grad)


def _joined(tensors: list[torch.Tensor], requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.cat(tensors), requires_grad=requires_grad)
