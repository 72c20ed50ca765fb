"""One worker of the LoRA benchmark: adapters on a frozen base, over FSDP2 or ZeRO-3 with gloo, or over axon_ps.

It is started by lora.py; see step_worker.py for the protocol with its parent. FSDP2 has a reduce-scatter of
`all_to_all_single` and a sum, which moves the bytes of the theory. gloo's own moves twice as many.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step_worker
from step_worker import CLASSES, Batches, Side, void

RANK = 16
SCALE = 1 / 2048


class Adapted(nn.Module):
    """A frozen matrix in bfloat16, or of four bits a number, and its adapter."""

    def __init__(self, width: int, *, quantised: bool) -> None:
        super().__init__()
        self.width = width
        if quantised:
            base = torch.randint(256, (width * width // 2, 1), dtype=torch.uint8)
        else:
            base = (torch.randn(width, width) * width**-0.5).bfloat16()
        self.weight = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter((torch.randn(RANK, width) * width**-0.5).bfloat16())
        self.up = nn.Parameter(torch.zeros(width, RANK, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if weight.dtype is torch.uint8:
            numbers = torch.stack([weight.view(-1) >> 4, weight.view(-1) & 15], -1)
            weight = (numbers.view(self.width, self.width).to(x.dtype) - 8) * SCALE
        y: Tensor = F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)
        return y


class Block(nn.Module):
    """A residual MLP block of two adapted matrices."""

    def __init__(self, width: int, *, quantised: bool) -> None:
        super().__init__()
        self.up = Adapted(width, quantised=quantised)
        self.down = Adapted(width, quantised=quantised)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Model(nn.Module):
    """Blocks and a frozen classifier."""

    def __init__(self, width: int, blocks: int, *, quantised: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, quantised=quantised) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES, bias=False).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x.bfloat16()))
        return y


def fsdp2(options: argparse.Namespace) -> Side:
    """Make the side of PyTorch's fully_shard over gloo."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")

    class ReduceScatter:
        """All parts to their ranks, which add them."""

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            torch.sum(parts.view(group.size(), -1), 0, out=output_tensor)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())

    model: Any = Model(options.width, options.blocks, quantised=options.quantised)
    for block in model.blocks:
        fully_shard(block).set_custom_reduce_scatter(ReduceScatter())
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)

    def step(batches: Batches) -> Tensor:
        for x, target, _ in batches:
            loss = F.cross_entropy(model(x).float(), target)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Side(dist.get_rank(), dist.get_world_size(), step, dist.barrier, dist.destroy_process_group)


def zero3(options: argparse.Namespace) -> Side:
    """Make the side of DeepSpeed's ZeRO-3 over gloo, with its defaults: up to 10^9 parameters stay for backward."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore", FutureWarning)  # of torch, for each of its calls
    import deepspeed  # type: ignore[import-not-found]
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__.clear()  # its shared memory would pass between our hosts, which are namespaces
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = Model(options.width, options.blocks)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": options.tokens,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: Batches) -> Tensor:
        for x, target, _ in batches:
            loss = F.cross_entropy(engine(x).float(), target)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return Side(dist.get_rank(), dist.get_world_size(), step, dist.barrier, dist.destroy_process_group)


def axon(options: argparse.Namespace) -> Side:
    """Make the side of axon_ps, by `fully_shard`."""
    import axon_ps
    from axon_ps.parallel import fully_shard, sharded_model

    world = axon_ps.World.init()
    model: Any = Model(options.width, options.blocks, quantised=options.quantised)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    sharded_model(model)

    def step(batches: Batches) -> Tensor:
        for x, target, _ in batches:
            loss = F.cross_entropy(model(x).float(), target)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not optimizer.last.committed:
            raise RuntimeError("a step was not committed: the figures would not be of whole steps")
        optimizer.zero_grad()
        return loss.detach()

    return Side(
        rank=world.rank,
        world_size=world.world_size,
        step=step,
        barrier=lambda: void(world.gather_json(None)),
        close=world.close,
    )


def main() -> None:
    """Run one worker to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("fsdp2", "zero3", "axon"))
    parser.add_argument("--quantised", action="store_true")
    for name in ("width", "blocks", "tokens", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.set_defaults(device_s=0.0, micro=1, spread=1.0, order="")
    options = parser.parse_args()
    step_worker.serve({"fsdp2": fsdp2, "zero3": zero3, "axon": axon}[options.side], options)


if __name__ == "__main__":
    main()
