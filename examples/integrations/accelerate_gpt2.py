"""Accelerate, with the model and the optimizer on shard servers: two lines are other than in accelerate's own examples.

    axon-ps run --nproc-per-node 2 --shards 2 --max-restarts 3 examples/integrations/accelerate_gpt2.py

Needs the extra `hf`. Kill a shard server, or a worker: training goes on. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from axon_ps.huggingface import Accelerator  # was: from accelerate import Accelerator
from tiny import Windows, gpt2, parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    options = parser(__doc__, "runs/accelerate").parse_args(arguments)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if options.bf16 else "no",
        gradient_accumulation_steps=options.accumulate,
        dynamo_backend=options.compile,
        # the order of an epoch follows from its number, so it is the same after a restart
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
    )
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
    step = model.version  # was:
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
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out / "model", state_dict=state)
        (options.out / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
