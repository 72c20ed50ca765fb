"""One worker of the DDP benchmark: the same model and loop over torch's DDP with gloo, or over axon_ps.

It is started by ddp.py, and talks with its parent as step_worker.py does.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from step_worker import Batches, ResidualMLP, Side, Step, serve, void


def gloo(options: argparse.Namespace) -> Side:
    """Make the side of torch's DistributedDataParallel over gloo, with its fp16 hook or none."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(ResidualMLP(options.width, options.blocks), gradient_as_bucket_view=True)
    if options.hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    step = stepper(model, options)
    return Side(dist.get_rank(), dist.get_world_size(), step, dist.barrier, dist.destroy_process_group)


def axon(options: argparse.Namespace) -> Side:
    """Make the side of axon_ps, with a hook by its name."""
    import axon_ps
    from axon_ps.parallel import DDP

    world = axon_ps.World.init()
    model = DDP(ResidualMLP(options.width, options.blocks), world.default_group, gradient_as_bucket_view=True)
    model.register_comm_hook(options.hook)
    step = stepper(model, options)
    return Side(world.rank, world.world_size, step, lambda: void(world.gather_json(None)), world.close)


def stepper(model: torch.nn.Module, options: argparse.Namespace) -> Step:
    """Return a step: forward, backward and a local optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)

    def step(batches: Batches) -> Tensor:
        for x, target, _ in batches:
            loss = F.cross_entropy(model(x), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def parse() -> argparse.Namespace:
    """Parse the command line that ddp.py writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("gloo", "axon"))
    parser.add_argument("--hook", default="all_reduce")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.set_defaults(micro=1, spread=1.0, device_s=0.0)
    return parser.parse_args()


def main() -> None:
    """Run one worker to its end."""
    options = parse()
    serve({"gloo": gloo, "axon": axon}[options.side], options)


if __name__ == "__main__":
    main()
