"""Habits of users of transformers' Trainer: with `axon` as the first word of argv on the shard servers, else DDP."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from feature_parts import BATCH, SCHEDULERS, Feature, Found, Net, inputs, numbers, run

ON_SERVERS: Final = sys.argv.pop(1) == "axon"
if ON_SERVERS:
    from axon_ps.huggingface import Trainer

    torch.distributed.init_process_group("axon")
else:
    from transformers import Trainer


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Of dicts, as Trainer wants them."""

    def __init__(self) -> None:
        self.x, self.y = inputs()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Model(Net):
    """Returns its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        """A dict, as transformers' models do."""
        y = super().forward(x)
        return {"loss": (y - labels).square().mean(), "logits": y} if labels is not None else {"logits": y}


class Rates(TrainerCallback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """As the optimizer has it."""
        self.rates.append(optimizer.param_groups[0]["lr"])


Optimizers = Callable[[nn.Module], tuple[Any, Any]]


def train(
    directory: Path,
    *,
    optimizers: Optimizers = lambda model: (None, None),
    callbacks: Callable[[nn.Module], list[TrainerCallback]] = lambda model: [],
    model: nn.Module | None = None,
    resume: Path | None = None,
    cls: Any = None,
    **arguments: Any,
) -> Found:
    """Train; what is compared."""
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 0.02,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    rates = Rates()
    model = model or Model()
    trainer = (cls or Trainer)(
        model=model,
        args=TrainingArguments(output_dir=str(directory / "out"), **{**given, **arguments}),
        train_dataset=Samples(),
        eval_dataset=Samples(),
        optimizers=optimizers(model),
        callbacks=[rates, *callbacks(model)],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"rates": rates.rates, "losses": losses, "evaluated": evaluated, "norms": norms, **numbers(state)}


def own(schedule: str | None = None, kind: Any = torch.optim.AdamW, **options: Any) -> Optimizers:
    """An optimizer of one's own, and a scheduler."""

    def make(model: nn.Module) -> tuple[Any, Any]:
        optimizer = kind(model.parameters(), **{"lr": 0.02, **options})
        return optimizer, None if schedule is None else SCHEDULERS[schedule](optimizer)

    return make


def with_own(schedule: str | None, **arguments: Any) -> Feature:
    """`Trainer(optimizers=...)`."""
    return lambda where: train(where, optimizers=own(schedule), **arguments)


def groups(model: nn.Module) -> tuple[Any, Any]:
    """Two groups with rates of their own, and a name."""
    parts = [
        {"params": list(part.parameters()), "lr": 0.01 * (1 + number), "name": name}
        for number, (name, part) in enumerate(model.named_children())
    ]
    optimizer = torch.optim.SGD(parts, momentum=0.9, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


class Average(TrainerCallback):
    """A moving average of the parameters.

    Args:
        model: the user's.
        inside: whether it reads where parameters can be read.
    """

    def __init__(self, model: nn.Module, inside: bool = False) -> None:
        self.average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
        self.inside = inside
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The average moves."""
        reading = contextlib.nullcontext()
        if self.inside and ON_SERVERS:
            reading = self.trainer.model_wrapped.summon_full_params()
        with reading:
            self.average.update_parameters(model)


def averaged(directory: Path, *, inside: bool) -> Found:
    """An average by a callback."""
    kept: list[Any] = []

    def make(model: nn.Module) -> list[TrainerCallback]:
        kept.append(Average(model, inside))
        return kept

    class Known(Trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            kept[0].trainer = self
            return super().train(*args, **kwargs)

    found = train(directory, callbacks=make, cls=Known)
    return {**found, "average": numbers(kept[0].average.module.state_dict())}


class AverageOfStates(TrainerCallback):
    """A moving average by state dicts."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The average moves."""
        for name, now in self.trainer.model_wrapped.state_dict().items():
            name = name.removeprefix("module.")
            self.average[name] = self.average.get(name, now).lerp(now, 0.1)


def averaged_states(directory: Path) -> Found:
    """An average of what `state_dict()` gives."""
    callback = AverageOfStates()

    class Known(Trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            callback.trainer = self
            return super().train(*args, **kwargs)

    found = train(directory, callbacks=lambda model: [callback], cls=Known)
    return {**found, "average": numbers(callback.average)}


class Unfreeze(TrainerCallback):
    """Trains the backbone from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """In the second epoch."""
        if state.epoch and round(state.epoch) == 1:
            model.backbone.requires_grad_(True)


class Freeze(TrainerCallback):
    """Trains the backbone in the first epoch only."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """In the second epoch."""
        if state.epoch and round(state.epoch) == 1:
            model.backbone.requires_grad_(False)


class Slower(TrainerCallback):
    """Sets the learning rate of the optimizer that the trainer was given."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lower with each step."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 / (1 + state.global_step)


def slower(directory: Path) -> Found:
    """The learning rate of a callback's; no scheduler changes it."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fixed = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    fixed.step = lambda *args: None  # type: ignore[method-assign]
    return train(
        directory,
        model=model,
        optimizers=lambda model: (optimizer, fixed),
        callbacks=lambda model: [Slower(optimizer)],
    )


def frozen_first(directory: Path) -> Found:
    """The backbone is frozen when training begins, with the optimizer of all."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model.backbone.requires_grad_(False)
    return train(
        directory, model=model, optimizers=lambda model: (optimizer, None), callbacks=lambda model: [Unfreeze()]
    )


def two_losses(directory: Path) -> Found:
    """`training_step` makes two backwards."""

    class Twice(Trainer):  # type: ignore[misc, valid-type]
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            super().training_step(model, inputs, num_items_in_batch)
            found: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return found

    return train(directory, cls=Twice)


def evaluated(directory: Path) -> Found:
    """`evaluate()` before training, `predict()` after it."""
    arguments = TrainingArguments(
        output_dir=str(directory), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        per_device_eval_batch_size=BATCH, per_device_train_batch_size=BATCH, max_steps=4, save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Samples(), eval_dataset=Samples())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    predicted = trainer.predict(Samples()).predictions
    return {"before": before, "after": trainer.evaluate()["eval_loss"], "predicted": predicted.flatten().tolist()}


def resumed(
    directory: Path, part: int, optimizers: Optimizers = lambda model: (None, None), step: int = 5, **arguments: Any
) -> Found:
    """Steps with checkpoints, and the rest from one of them."""
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * part)  # which the checkpoint replaces
    options = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 3, **arguments}
    where = directory / "out" / f"checkpoint-{step}"
    return train(directory, model=model, optimizers=optimizers, resume=where if part else None, **options)


EVALUATED: Final = {"eval_strategy": "epoch"}

FEATURES: Final[dict[str, Feature]] = {
    "plain": lambda where: train(where, **EVALUATED),
    "accumulate": lambda where: train(where, gradient_accumulation_steps=2),
    "accumulate 5": lambda where: train(where, gradient_accumulation_steps=5, num_train_epochs=3),
    "accumulate, sync_each_batch": lambda where: train(
        where,
        accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}},
    ),
    "two backwards": two_losses,
    "bf16": lambda where: train(where, bf16=True, gradient_accumulation_steps=2),
    "batch norm": lambda where: train(where, model=Model(norm=True), **EVALUATED),
    "clip": lambda where: train(where, max_grad_norm=0.05, gradient_accumulation_steps=2),
    "no clip": lambda where: train(where, max_grad_norm=0.0),
    "own AdamW": with_own(None),
    **{f"own {name}": with_own(name) for name in SCHEDULERS},
    "own SequentialLR, accumulate": with_own("SequentialLR", gradient_accumulation_steps=2),
    "own groups": lambda where: train(where, optimizers=groups),
    "rate on the given optimizer": slower,
    **{
        name: functools.partial(train, lr_scheduler_type=name, warmup_steps=2)
        for name in ("linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt")
    },
    "reduce_lr_on_plateau": lambda where: train(
        where, lr_scheduler_type="reduce_lr_on_plateau", num_train_epochs=4,
        lr_scheduler_kwargs={"patience": 0, "threshold": 10.0, "threshold_mode": "abs"}, **EVALUATED,
    ),
    "sgd": lambda where: train(where, optim="sgd"),
    "weight decay": lambda where: train(where, weight_decay=0.1),
    "adafactor": lambda where: train(where, optim="adafactor"),
    "EMA": lambda where: averaged(where, inside=False),
    "EMA inside summon_full_params": lambda where: averaged(where, inside=True),
    "EMA of state dicts": averaged_states,
    "unfreeze": frozen_first,
    "freeze": lambda where: train(where, callbacks=lambda model: [Freeze()]),
    "best model": lambda where: train(
        where, load_best_model_at_end=True, save_strategy="epoch", num_train_epochs=3, learning_rate=0.1, **EVALUATED
    ),
    "evaluate, train, predict": evaluated,
}  # fmt: skip

RESUMED: Final = {
    "resume": resumed,
    "resume, accumulate": functools.partial(resumed, gradient_accumulation_steps=2, num_train_epochs=6),
    "resume, own SequentialLR": functools.partial(resumed, optimizers=own("SequentialLR")),
    "resume, own OneCycleLR": functools.partial(resumed, optimizers=own("OneCycleLR")),
    "resume, own groups": functools.partial(resumed, optimizers=groups),
    "resume, cosine": functools.partial(resumed, lr_scheduler_type="cosine", warmup_steps=2),
    "resume, in an epoch": functools.partial(resumed, save_steps=1, num_train_epochs=2, step=7),
}

if __name__ == "__main__":
    run(FEATURES, RESUMED, lambda: None)
