"""Lightning, with the model and the optimizer on shard servers: two lines are other than for its strategy "ddp".

    axon-ps run --nproc-per-node 2 --shards 2 --max-restarts 3 examples/integrations/lightning_gpt2.py

Needs the extra `lightning`, and transformers for the model. `--strategy axon_ddp` and `axon_fsdp2` are Lightning's own
DDP and FSDP2 over axon_ps. Kill a shard server, or a worker: training goes on. `--resume` goes on from the last
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import axon_ps.lightning  # noqa: F401  # was:
from tiny import Windows, gpt2, parser


class Module(L.LightningModule):
    """A tiny GPT-2; the losses of its steps are in `losses`, those of validation in `validated`."""

    def __init__(self, checkpointing: bool = False, compiled: str | None = None) -> None:
        super().__init__()
        self.gpt2 = gpt2()
        self.losses: list[dict[str, float]] = []
        self.validated: list[float] = []
        if checkpointing:
            self.gpt2.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled is not None:
            self.gpt2.compile(backend=compiled)

    def configure_model(self) -> None:
        """FSDP2's part, for the strategies that ask for it."""
        if self.device_mesh is not None:
            for block in self.gpt2.transformer.h:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.gpt2, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = self.gpt2(**batch).loss
        self.log("loss", loss, prog_bar=True)
        mean = self.all_gather(loss.detach()).mean().item()
        self.losses.append({"step": self.trainer.fit_loop.total_batch_idx + 1, "loss": mean})
        print(f"batch {self.losses[-1]['step']}: {mean:.4f}", flush=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        """The loss of a batch."""
        loss = self.gpt2(**batch).loss
        self.log("val_loss", loss, sync_dist=True)
        self.validated.append(self.all_gather(loss).mean().item())

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, with a learning rate that rises in the first 4 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate and save."""
    command = parser(__doc__, "runs/lightning")
    command.add_argument("--strategy", default="axon")  # was: command.add_argument("--strategy", default="ddp")
    options = command.parse_args(arguments)
    checkpoints = options.save_every is not None or options.resume
    fsdp2 = options.strategy in ("axon_fsdp2", "fsdp2")
    lightnings = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)  # which has no name there
    module = Module(options.checkpointing, options.compile)
    save = ModelCheckpoint(options.out, save_last=True, save_top_k=-1, every_n_train_steps=options.save_every)
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy=lightnings if options.strategy == "fsdp2" else options.strategy,
        precision=("bf16-true" if fsdp2 else "bf16-mixed") if options.bf16 else "32-true",  # FSDP2 has no autocast here
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=None if fsdp2 else 1.0,  # which Lightning refuses for FSDP2
        callbacks=[save] if checkpoints else [],  # Lightning looks there for the last one
        enable_checkpointing=checkpoints,
        default_root_dir=options.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(Windows(), batch_size=4)
    trainer.fit(module, train, DataLoader(Windows(8), batch_size=4), ckpt_path="last" if options.resume else None)
    trainer.save_checkpoint(options.out / "end.ckpt")
    if trainer.is_global_zero:
        (options.out / "losses.json").write_text(json.dumps(module.losses))
        (options.out / "validated.json").write_text(json.dumps(module.validated))


if __name__ == "__main__":
    main()
