"""A model of LoRA adapters on a frozen base, in bfloat16 or quantised to four bits as bitsandbytes does it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

WIDTH, BLOCKS, RANK = 64, 4, 4

Base = Literal["bf16", "4bit"]


class Params4bit(nn.Parameter):
    """Two numbers a byte, of shape [n, 1], with their scales beside them, as bitsandbytes' class of this name."""

    quant_state: Any

    def __new__(cls, data: torch.Tensor, quant_state: Any = None) -> Params4bit:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made


class Adapted(nn.Module):
    """A frozen weight and the adapter of it."""

    def __init__(self, base: Base, seed: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(seed)
        weight = torch.randn(WIDTH, WIDTH, generator=values) / 8
        self.weight: nn.Parameter
        if base == "bf16":
            self.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
        else:
            scale = weight.abs().max() / 7
            numbers = (weight / scale).round().add(8).to(torch.uint8).view(-1, 2)
            self.weight = Params4bit((numbers[:, 0] << 4 | numbers[:, 1]).view(-1, 1), {"scale": scale})
        self.down = nn.Parameter(torch.randn(RANK, WIDTH, generator=values) / 8)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def dequantised(self) -> torch.Tensor:
        """Return the weight that the module computes with."""
        if self.weight.dtype is torch.uint8:
            state: Any = self.weight.quant_state
            numbers = torch.stack([self.weight.view(-1) >> 4, self.weight.view(-1) & 15], -1)
            return (numbers.view(WIDTH, WIDTH).float() - 8) * state["scale"]
        return self.weight.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.dequantised().to(x.dtype).T) + x @ self.down.T @ self.up.T


def build(base: Base, blocks: int = BLOCKS) -> nn.Sequential:
    """Return the model, the same every time."""
    head = nn.Linear(WIDTH, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(99)))
    return nn.Sequential(*(Adapted(base, seed) for seed in range(blocks)), head)


def batch(seed: int) -> torch.Tensor:
    """Return the inputs of a step."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def frozen_bits(state: Any) -> dict[str, bytes]:
    """Return the bits of every frozen weight in a state dict."""
    weights = {name: value for name, value in state.items() if name.endswith("weight") and value.shape[0] != 2}
    return {name: value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in weights.items()}


def adapter_bytes(model: nn.Module) -> int:
    """Return the bytes of what is trained, as it is sent."""
    return sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
