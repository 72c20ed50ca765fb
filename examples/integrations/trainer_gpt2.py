"""transformers' Trainer, with the model and the optimizer on shard servers: two lines are other than in its examples.

    axon-ps run --nproc-per-node 2 --shards 2 --max-restarts 3 examples/integrations/trainer_gpt2.py

Needs the extra `hf`. Kill a shard server, or a worker: training goes on. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainingArguments

from axon_ps.huggingface import Trainer  # was: from transformers import Trainer
from tiny import Windows, gpt2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", help="a backend of torch.compile")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate and save."""
    options = parse(arguments)
    torch.distributed.init_process_group("axon")  # was:
    trainer = Trainer(
        model=gpt2(),
        args=TrainingArguments(
            output_dir=str(options.out),
            use_cpu=not torch.cuda.is_available(),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=3e-3,
            warmup_steps=4,
            bf16=options.bf16,
            torch_compile=options.compile is not None,
            torch_compile_backend=options.compile,
            gradient_checkpointing=options.checkpointing,
            save_strategy="steps" if options.save_every else "no",
            save_steps=options.save_every or 500,
            eval_strategy="steps",
            eval_steps=8,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Windows(),
        eval_dataset=Windows(8),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "model"))
    if trainer.is_world_process_zero():
        (options.out / "losses.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
