"""PyTorch alone, its DDP or FSDP2 over axon_ps: one line is other than over gloo or NCCL.

    axon-ps run --nproc-per-node 2 --shards 1 --max-restarts 3 examples/integrations/torch_gpt2.py --resume

Needs transformers for the model. `--parallel fsdp2` is `fully_shard`. Model and optimizer are on the workers: when one
dies, all start again, and with `--resume` go on from the last checkpoint, which DCP has written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tiny import Windows, gpt2, parser


def prepare(model: nn.Module, parallel: str) -> nn.Module:
    """The model under DDP or FSDP2."""
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def sync_in_backward(model: nn.Module, sync: bool) -> None:
    """Whether the next backward averages gradients over the processes."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = sync  # what its no_sync() sets
    else:
        model.set_requires_gradient_sync(sync)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Write a checkpoint, each process its part; it has its name when it is whole."""
    parameters, state = get_state_dict(model, optimizer)
    begun = directory.with_suffix(".begun")
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=begun)
    if dist.get_rank() == 0:
        begun.rename(directory)
    dist.barrier()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Take what `save` has written."""
    parameters, state = get_state_dict(model, optimizer)
    values: dict[str, Any] = {"model": parameters, "optimizer": state}
    dcp.load(values, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    command = parser(__doc__, "runs/torch")
    command.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp")
    options = command.parse_args(arguments)
    dist.init_process_group("axon")  # was: dist.init_process_group("gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = gpt2().to(device)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = prepare(model, options.parallel)
    if options.compile:
        model.compile(backend=options.compile)
    sampler = DistributedSampler(Windows(), seed=1)
    loader = DataLoader(Windows(), batch_size=4, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = {int(path.name.removeprefix("step_")): path for path in options.out.glob("step_*[0-9]")}
    step = max(saved, default=0) if options.resume else 0
    if step:
        load(model, optimizer, saved[step])
    per_epoch = len(loader) // options.accumulate
    losses = []
    while step < options.steps:
        epoch, used = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            if index < used * options.accumulate:
                continue
            last = (index + 1) % options.accumulate == 0
            sync_in_backward(model, last)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            (loss / options.accumulate).backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.SUM)
            losses.append({"step": step + 1, "loss": mean.item() / dist.get_world_size()})
            if not last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step}: {losses[-1]['loss']:.4f}", flush=True)
            if options.save_every and step % options.save_every == 0:
                save(model, optimizer, options.out / f"step_{step}")
            if step == options.steps:
                break
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
