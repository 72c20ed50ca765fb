"""A small byte-level GPT in plain torch: the model of the main job. Knows nothing of axon_ps.

Shapes: B batch, T time (bytes), C channels (`GPTConfig.channels`), H heads, D = C / H, V = 256 byte values.

One token is one byte, so there is no tokenizer to ship and any file can be read. Positions enter through rotary
embeddings; there are no biases at all (a key bias in particular has a gradient of exactly zero); the output layer is
the embedding's own matrix. Every projection that writes into the residual stream starts at zero, so an untrained
block is the identity and a large learning rate is safe from the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model. The defaults are about 4.8 million parameters."""

    context: int = 256
    channels: int = 256
    layers: int = 6
    heads: int = 4

    def __post_init__(self) -> None:
        if self.channels % (2 * self.heads):
            raise ValueError(f"{self.channels} channels cannot be cut into {self.heads} heads of an even width")

    def as_dict(self) -> dict[str, int]:
        """The fields as plain numbers, for a checkpoint's extra data."""
        return asdict(self)


@lru_cache(maxsize=8)
def rotary_table(time: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D/2] of the rotary angles (RoFormer, https://arxiv.org/abs/2104.09864)."""
    frequency = 1.0 / 10_000.0 ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of channels of x: [B, H, T, D] by its position's angle."""
    cos, sin = rotary_table(x.size(-2), x.size(-1), x.dtype, x.device)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.channels, 3 * config.channels, bias=False)
        self.out = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, channels = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, channels))


class MLP(nn.Module):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.channels, 4 * config.channels, bias=False)
        self.down = nn.Linear(4 * config.channels, config.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream. The unit of sharding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.channels, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.channels, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Byte-level language model: i64[B, T] -> logits [B, T, V], or the mean loss when targets are given."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.embedding = nn.Embedding(VOCABULARY, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels, bias=False)
        self.head = nn.Linear(config.channels, VOCABULARY, bias=False)
        self.reset_parameters()
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Draw fresh parameters from torch's generator; what writes into the residual stream becomes zero."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, Attention | MLP):
                first, last = module.children()
                nn.init.normal_(first.weight, std=self.config.channels**-0.5)  # type: ignore[arg-type]
                nn.init.zeros_(last.weight)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, *, context: int, temperature: float = 0.7, seed: int = 0
) -> Iterator[int]:
    """Yield `length` bytes that follow `prompt`, one at a time, drawn at `temperature` (0: the likeliest byte)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], dtype=torch.long)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(keepdim=True)
        tokens = torch.cat((tokens, token[None]), dim=1)
        yield int(token)
