"""transformers' Trainer, with the model and the optimizer on shard servers: two lines are other than in its examples.

    axon-ps run --nproc-per-node 2 --shards 2 --max-restarts 3 examples/integrations/trainer_gpt2.py

Needs the extra `hf`. Kill a shard server, or a worker: training goes on. `--resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from transformers import TrainingArguments

from axon_ps.huggingface import Trainer  # was: from transformers import Trainer
from tiny import Windows, gpt2, parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate and save."""
    options = parser(__doc__, "runs/trainer").parse_args(arguments)
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
