"""Modules and callbacks of Lightning's users: with `axon` as the first word of argv on the shard servers, else DDP."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, TensorDataset

from feature_parts import BATCH, SCHEDULERS, WORKERS, Feature, Found, Net, inputs, numbers, run

ON_SERVERS: Final = sys.argv.pop(1) == "axon"
if ON_SERVERS:
    import axon_ps.lightning  # noqa: F401

    STRATEGY = "axon"
else:
    STRATEGY = "ddp_find_unused_parameters_true"


class Module(L.LightningModule):
    """The model.

    Args:
        schedule: makes the scheduler that `configure_optimizers` returns.
        interval: when Lightning steps it.
        norm: whether with a batch norm.
    """

    def __init__(
        self, schedule: Callable[[Any], Any] | None = None, *, interval: str = "step", norm: bool = False
    ) -> None:
        super().__init__()
        net = Net(norm)
        self.backbone, self.head = net.backbone, net.head
        self.schedule, self.interval = schedule, interval
        self.rates: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A value of each sample."""
        y: torch.Tensor = self.head(self.backbone(x))
        return y

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean square of the error."""
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss; the learning rate is noted."""
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """The mean loss of all workers is noted."""
        loss = self.loss(batch)
        self.validated.append(self.all_gather(loss).mean().item())
        self.log("val", loss, sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        """The values."""
        y: torch.Tensor = self(batch[0])
        return y

    def configure_optimizers(self) -> Any:
        """AdamW of what is trained."""
        optimizer = torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.02)
        if self.schedule is None:
            return optimizer
        rate = {"scheduler": self.schedule(optimizer), "interval": self.interval, "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": rate}


def loader() -> Any:
    """The data, in order."""
    return DataLoader(TensorDataset(*inputs()), batch_size=BATCH)


def trainer_of(epochs: int = 3, *, validate: bool = False, **options: Any) -> Any:
    """A trainer."""
    checks = {} if validate else {"limit_val_batches": 0}
    return L.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=STRATEGY,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        **checks,
        **options,
    )


def fit(module: Any, *, start: Path | None = None, end: Path | None = None, **options: Any) -> Found:
    """Train; what is compared."""
    trainer = trainer_of(**options)
    trainer.fit(module, Ordered(), ckpt_path=None if start is None else str(start))
    if end is not None:
        trainer.save_checkpoint(end)
    state = trainer.strategy.lightning_module_state_dict()
    return {"rates": module.rates, "validated": module.validated, **numbers(state)}


class Ordered(L.LightningDataModule):
    """The data of training and validation, each worker's every other sample."""

    def train_dataloader(self) -> Any:
        """In order."""
        return loader()

    def val_dataloader(self) -> Any:
        """The same."""
        return loader()


class Manual(Module):
    """Manual optimization.

    Args:
        every: a step after so many batches.
        block: whether backwards before a step are inside `toggle_model(sync_grad=False)`.
        clip: what gradients are clipped to.
    """

    def __init__(self, *, every: int = 1, block: bool = False, clip: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.every, self.block, self.clip = every, block, clip

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        """All of it."""
        optimizer: Any = self.optimizers()
        last = (index + 1) % self.every == 0
        self.rates.append(optimizer.param_groups[0]["lr"])
        with optimizer.toggle_model(sync_grad=last or not self.block):
            self.manual_backward(self.loss(batch) / self.every)
            if last:
                if self.clip is not None:
                    self.clip_gradients(optimizer, self.clip, "norm")
                optimizer.step()
                optimizer.zero_grad()
        if self.schedule is not None:
            rate: Any = self.lr_schedulers()
            rate.step()


class Gan(Module):
    """Two optimizers by turns, as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        """One step of each."""
        for sign, optimizer in zip((1.0, -1.0), self.optimizers(), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """Of the backbone, and of the head."""
        return [torch.optim.SGD(part.parameters(), lr=0.02) for part in (self.backbone, self.head)]


class Closure(Manual):
    """Manual optimization by a closure."""

    def training_step(self, batch: Any, index: int) -> None:
        """One step."""
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Own(Module):
    """A scheduler that Lightning does not know of."""

    def configure_optimizers(self) -> Any:
        """Only the optimizer."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        self.rate = SCHEDULERS["SequentialLR"](optimizer)
        return optimizer

    def on_train_batch_end(self, *args: Any) -> None:
        """A step of the scheduler."""
        self.rate.step()


class Groups(Module):
    """Two groups with rates of their own."""

    def configure_optimizers(self) -> Any:
        """SGD with momentum, and a scheduler."""
        groups = [{"params": self.backbone.parameters(), "lr": 0.01}, {"params": self.head.parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Unfreeze(callbacks.Callback):
    """Freezes before training and unfreezes later, by hand."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Before the model is wrapped."""
        module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """In the second epoch."""
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True)


class Freeze(callbacks.Callback):
    """Freezes later."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """In the second epoch."""
        module.backbone.requires_grad_(trainer.current_epoch != 1)


class Dropping(callbacks.StochasticWeightAveraging):
    """Lightning's, and no step with the last gradient again in the pass that measures the batch norms."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Without gradients."""
        super().on_train_epoch_start(trainer, pl_module)
        trainer.optimizers[0].zero_grad()


def of(schedule: str, **options: Any) -> Feature:
    """A scheduler that `configure_optimizers` returns."""
    return lambda where: fit(Module(SCHEDULERS[schedule], **options))


def plateau(optimizer: Any) -> Any:
    """Of a loss that is never low enough."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")


def with_callback(make: Callable[[], Any], **options: Any) -> Feature:
    """A callback."""
    return lambda where: fit(Module(norm=options.get("norm", False)), callbacks=[make()], **rest(options))


def rest(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the trainer."""
    return {name: value for name, value in options.items() if name != "norm"}


def validated_before(directory: Path) -> Found:
    """`validate()` before `fit()`, with the same trainer, and `predict()` after it."""
    module, trainer = Module(), trainer_of(validate=True)
    trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, Ordered())
    predicted = trainer.predict(module, loader())
    state = trainer.strategy.lightning_module_state_dict()
    return {"validated": module.validated, "predicted": torch.cat(predicted).flatten().tolist(), **numbers(state)}


def fitted_twice(directory: Path) -> Found:
    """The same trainer goes on after its epochs."""
    module, trainer = Module(), trainer_of(2)
    trainer.fit(module, Ordered())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, Ordered())
    return {"rates": module.rates, **numbers(trainer.strategy.lightning_module_state_dict())}


def resumed(directory: Path, part: int, make: Callable[[], Any] = Module, **options: Any) -> Found:
    """Two epochs and a checkpoint, and two more."""
    module = make()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.1 * part)  # which the checkpoint replaces
    given = {**options, "callbacks": [make() for make in options.get("callbacks", ())]}
    where = directory / "saved.ckpt"
    if part:
        return fit(module, start=where, epochs=5, **given)
    return fit(module, end=where, epochs=3, **given)


FINETUNING: Final = functools.partial(
    callbacks.BackboneFinetuning, unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5
)
AVERAGED: Final = {"swa_lrs": 0.01, "swa_epoch_start": 2, "annealing_epochs": 2}
SWA: Final = functools.partial(callbacks.StochasticWeightAveraging, **AVERAGED)
EMA: Final = functools.partial(callbacks.EMAWeightAveraging, decay=0.9)

FEATURES: Final[dict[str, Feature]] = {
    "plain": lambda where: fit(Module()),
    "accumulate": lambda where: fit(Module(), accumulate_grad_batches=2),
    "accumulate, scheduled": with_callback(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 5})),
    "bf16": lambda where: fit(Module(), precision="bf16-mixed"),
    "batch norm": lambda where: fit(Module(norm=True), validate=True),
    "groups": lambda where: fit(Groups()),
    "clip norm": lambda where: fit(Module(), gradient_clip_val=0.05, accumulate_grad_batches=2),
    "clip value": lambda where: fit(Module(), gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    "manual": lambda where: fit(Manual()),
    "manual, clip, scheduler": lambda where: fit(Manual(clip=0.05, schedule=SCHEDULERS["SequentialLR"])),
    "manual, closure": lambda where: fit(Closure()),
    "manual, accumulate": lambda where: fit(Manual(every=2, block=True)),
    "manual, two backwards": lambda where: fit(Manual(every=2)),
    "two optimizers": lambda where: fit(Gan()),
    **{name: of(name) for name in SCHEDULERS},
    "SequentialLR, each epoch": of("SequentialLR", interval="epoch"),
    "SequentialLR, accumulate": lambda where: fit(Module(SCHEDULERS["SequentialLR"]), accumulate_grad_batches=2),
    "ReduceLROnPlateau": lambda where: fit(Module(plateau)),
    "ReduceLROnPlateau, each epoch": lambda where: fit(Module(plateau, interval="epoch")),
    "scheduler of one's own": lambda where: fit(Own()),
    "SWA": with_callback(SWA, epochs=4),
    "SWA, batch norm": with_callback(
        lambda: Dropping(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2), epochs=4, norm=True
    ),
    "EMA": with_callback(EMA),
    "EMA, validated": with_callback(EMA, validate=True),
    "BackboneFinetuning": with_callback(FINETUNING),
    "unfreeze": with_callback(Unfreeze),
    "freeze": with_callback(Freeze),
    "early stopping": with_callback(
        lambda: callbacks.EarlyStopping("val", min_delta=10.0, patience=0), validate=True, epochs=5
    ),
    "validate, fit, predict": validated_before,
    "fit twice": fitted_twice,
}

RESUMED: Final = {
    "resume": functools.partial(resumed, make=lambda: Module(SCHEDULERS["SequentialLR"])),
    "resume, OneCycleLR": functools.partial(resumed, make=lambda: Module(SCHEDULERS["OneCycleLR"])),
    "resume, ChainedScheduler": functools.partial(
        resumed, make=lambda: Module(SCHEDULERS["ChainedScheduler"], interval="epoch"), accumulate_grad_batches=2
    ),
    "resume, manual": functools.partial(resumed, make=Manual),
    "resume, batch norm": functools.partial(resumed, make=lambda: Module(norm=True)),
    "resume, groups": functools.partial(resumed, make=Groups),
    "resume, BackboneFinetuning": functools.partial(resumed, callbacks=[FINETUNING]),
    "resume, EMA": functools.partial(resumed, callbacks=[EMA]),
    "resume, SWA": functools.partial(resumed, callbacks=[SWA]),
}

if __name__ == "__main__":
    run(FEATURES, RESUMED, lambda: None)
