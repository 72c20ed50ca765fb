"""TRL's supervised fine-tuning, with the model and the optimizer on shard servers: two lines are other.

    axon-ps run --nproc-per-node 2 --shards 2 examples/integrations/trl_sft.py

Needs the extra `hf`, and trl. The tokenizer is made here, of bytes, and the data set is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from axon_ps.huggingface import on_servers  # was:
from tiny import CONTEXT, TEXT, gpt2, parser

SFTTrainer = on_servers(SFTTrainer)  # was:


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter is a token."""
    letters = {letter: number for number, letter in enumerate(["<pad>", *sorted(set(TEXT))])}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune and save."""
    options = parser(__doc__, "runs/sft").parse_args(arguments)
    texts = [TEXT[17 * i % 1000 :][: CONTEXT - 1] for i in range(64)]
    trainer = SFTTrainer(
        model=gpt2(),
        args=SFTConfig(
            output_dir=str(options.out),
            use_cpu=not torch.cuda.is_available(),
            max_steps=options.steps,
            max_length=CONTEXT,
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
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "model"))
    if trainer.is_world_process_zero():
        (options.out / "losses.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
