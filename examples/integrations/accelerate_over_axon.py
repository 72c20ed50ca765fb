"""Accelerate's own DDP or FSDP2 over axon_ps, the parameters on the workers: one line is other than over gloo or NCCL.

    axon-ps run --nproc-per-node 2 --shards 1 --max-restarts 3 examples/integrations/accelerate_over_axon.py --resume

Needs the extra `hf`. `--parallel fsdp2` is `FullyShardedDataParallelPlugin(fsdp_version=2)`. When a worker dies, all
start again, and with `--resume` go on from the last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from tiny import Windows, gpt2, parser


def fsdp2() -> FullyShardedDataParallelPlugin:
    """How the model is sharded: each block by itself."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def shard_without_gpu(accelerator: Accelerator) -> None:
    """What accelerate does where there are GPUs; without, it leaves the plugin out, and says nothing."""
    state: Any = accelerator.state
    state.fsdp_plugin = fsdp2()
    if accelerator.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    command = parser(__doc__, "runs/accelerate_over_axon")
    command.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp")
    options = command.parse_args(arguments)
    torch.distributed.init_process_group("axon")  # was:
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if options.bf16 else "no",
        gradient_accumulation_steps=options.accumulate,
        dynamo_backend=options.compile,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        fsdp_plugin=fsdp2() if options.parallel == "fsdp2" else None,
    )
    if options.parallel == "fsdp2" and accelerator.distributed_type is DistributedType.MULTI_CPU:
        shard_without_gpu(accelerator)
    model = gpt2()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loader = DataLoader(Windows(), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, 2 * options.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    saved = {int(path.name.removeprefix("step_")): path for path in options.out.glob("step_*")}
    step = max(saved, default=0) if options.resume else 0
    if step:
        accelerator.load_state(str(saved[step]))
    per_epoch = len(loader) // options.accumulate
    losses = []
    while step < options.steps:
        epoch, used = divmod(step, per_epoch)
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, used * options.accumulate) if used else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append({"step": step + 1, "loss": accelerator.gather(loss.detach()).mean().item()})
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step}: {losses[-1]['loss']:.4f}", flush=True)
                if options.save_every and step % options.save_every == 0:
                    accelerator.save_state(str(options.out / f"step_{step}"))
                if step == options.steps:
                    break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
