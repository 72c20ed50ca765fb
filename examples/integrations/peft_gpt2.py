"""PEFT's LoRA under transformers' Trainer, with the adapters and their optimizer on shard servers: two lines are other.

    axon-ps run --nproc-per-node 2 --shards 2 examples/integrations/peft_gpt2.py

Needs the extra `hf`, and peft. Only the adapters have gradients and optimizer state, and only they travel each step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from axon_ps.huggingface import Trainer  # was: from transformers import Trainer
from tiny import Windows, gpt2, parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the adapters and save them."""
    options = parser(__doc__, "runs/peft").parse_args(arguments)
    torch.distributed.init_process_group("axon")  # was:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(gpt2(), lora)
    if options.checkpointing:
        model.enable_input_require_grads()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.out),
            use_cpu=not torch.cuda.is_available(),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=1e-2,
            bf16=options.bf16,
            torch_compile=options.compile is not None,
            torch_compile_backend=options.compile,
            gradient_checkpointing=options.checkpointing,
            save_strategy="steps" if options.save_every else "no",
            save_steps=options.save_every or 500,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Windows(),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "adapter"))
    if trainer.is_world_process_zero():
        (options.out / "losses.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
