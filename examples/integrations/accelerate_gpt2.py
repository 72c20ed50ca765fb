"""Accelerate, with the model and the optimizer on shard servers: one line is another than in accelerate's own examples.

    axon-ps run --nproc-per-node 2 --shards 2 examples/integrations/accelerate_gpt2.py

Needs the extra `hf`. `--resume` goes on from what `--save-at` has saved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from axon_ps.huggingface import Accelerator  # was: from accelerate import Accelerator
from tiny import Windows, gpt2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--compile", default="no", help="a backend of torch.compile")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--save-at", type=int, help="save the state after this step")
    parser.add_argument("--resume", type=int, help="go on from the state that was saved after this step")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    options = parse(arguments)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.accumulate,
        dynamo_backend=options.compile,
    )
    model = gpt2()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loader = DataLoader(Windows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, 100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step, losses = 0, []
    if options.resume:
        accelerator.load_state(str(options.out / f"state-{options.resume}"))
        step = options.resume
    per_epoch = len(loader) // options.accumulate
    for epoch in range(step // per_epoch, options.epochs):
        loader.set_epoch(epoch)
        skipped = step % per_epoch * options.accumulate
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                step += 1
                if step == options.save_at:
                    accelerator.save_state(str(options.out / f"state-{step}"))
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out / "model", state_dict=state)
        (options.out / "losses.json").write_text(json.dumps(losses))
        print(f"{step} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, model in {options.out / 'model'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
