"""DDP on real data: a small convolutional network learns to read the handwritten digits that ship with scikit-learn.

    axon-ps run --nproc-per-node 2 examples/train_ddp_digits.py
    axon-ps run --nproc-per-node 2 examples/train_ddp_digits.py --hook int8

Needs the extra `examples`. 1,797 images of 8 x 8 (the test part of UCI's "Optical Recognition of Handwritten Digits"),
a fifth of them held out. Every worker has the whole network and a part of each epoch's images; gradients are averaged
while backward computes them, batch norm's statistics are rank 0's, and the optimizer is torch's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import axon_ps
from axon_ps.data import DistributedSampler
from axon_ps.parallel import DDP

HELD_OUT = 360


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images of a step, over all workers")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    hooks = ("all_reduce", "bf16", "fp16", "int8", "top_k")
    parser.add_argument("--hook", choices=hooks, default="all_reduce", help="how gradients travel")
    return parser.parse_args(arguments)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images f32[1797, 1, 8, 8] from 0 to 1 and labels i64[1797], in an order of their own."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16.0
    return images[order], torch.from_numpy(data.target).long()[order]


def build() -> nn.Module:
    """About 24,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 36),
        nn.ReLU(),
        nn.Linear(36, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that are read right."""
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def train(world: axon_ps.World, options: argparse.Namespace) -> float:
    """Train for some epochs; the accuracy on what was held out, on every worker the same."""
    images, labels = digits(options.seed)
    held_images, held_labels = images[:HELD_OUT], labels[:HELD_OUT]
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    torch.manual_seed(options.seed + world.rank)  # the wrapper makes rank 0's values everybody's
    model = DDP(build(), world.default_group, gradient_as_bucket_view=True)
    model.register_comm_hook(options.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    sampler = DistributedSampler(len(images), world.world_size, world.rank, seed=options.seed)
    mine = options.batch // world.world_size
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for indices in torch.tensor(list(sampler)).split(mine):
            loss = F.cross_entropy(model(images[indices]), labels[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            sampler.advance(len(indices))
        if world.is_main_process:  # evaluating is not collective
            right = accuracy(model, held_images, held_labels)
            print(f"epoch {epoch + 1}/{options.epochs}  loss {loss.item():.4f}  accuracy {right:.3f}", flush=True)
    model.sync_parameters()  # rank 0's running statistics, too
    return accuracy(model, held_images, held_labels)


def main(arguments: Sequence[str] | None = None) -> float:
    """Run one worker from joining to leaving; the accuracy."""
    options = parse(arguments)
    with axon_ps.World.init() as world:
        right = train(world, options)
        if world.is_main_process:
            print(f"accuracy on {HELD_OUT} images that were held out: {right:.3f}", flush=True)
        world.barrier("finished")
    return right


if __name__ == "__main__":
    main()
