"""Loops of Accelerate's users: with `axon` as the first word of argv on the shard servers, else DDP over gloo."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from feature_parts import BATCH, SCHEDULERS, Feature, Found, Net, inputs, numbers, run

ON_SERVERS: Final = sys.argv.pop(1) == "axon"
if ON_SERVERS:
    from axon_ps.huggingface import Accelerator
else:
    from accelerate import Accelerator


def begin(norm: bool = False, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
    """An accelerator, and a model, an optimizer and a loader, which are not prepared."""
    accelerator = Accelerator(cpu=True, **options)
    model = Net(norm)
    loader = DataLoader(TensorDataset(*inputs()), batch_size=BATCH)
    return accelerator, model, torch.optim.AdamW(model.parameters(), lr=0.02), loader


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean square of the error."""
    loss: torch.Tensor = (model(x) - y).square().mean()
    return loss


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def train(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    *,
    epochs: int = 2,
    clip: Callable[[], object] = lambda: None,
    after: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """The loop of Accelerate's documentation; learning rates as they are at each step."""
    rates, step = [], 0
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                if accelerator.sync_gradients:
                    clip()
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            after(step := step + 1)
    return rates


def result(accelerator: Any, model: nn.Module, rates: list[float] | None = None, **more: Any) -> Found:
    """The numbers that are compared."""
    return {"rates": rates or [], **more, **numbers(accelerator.get_state_dict(model))}


def plain(directory: Path, norm: bool = False, **options: Any) -> Found:
    """The loop, with options of the accelerator's."""
    accelerator, *made = begin(norm, **options)
    model, optimizer, loader = accelerator.prepare(*made)
    return result(accelerator, model, train(accelerator, model, optimizer, loader))


def clipped(directory: Path, *, by_value: bool, accumulate: int = 1) -> Found:
    """With gradients clipped."""
    accelerator, *made = begin(gradient_accumulation_steps=accumulate)
    model, optimizer, loader = accelerator.prepare(*made)
    clip = accelerator.clip_grad_value_ if by_value else accelerator.clip_grad_norm_
    rates = train(accelerator, model, optimizer, loader, clip=lambda: clip(model.parameters(), 0.05))
    return result(accelerator, model, rates)


def by_no_sync(directory: Path) -> Found:
    """Accumulation with `no_sync` of the accelerator's."""
    accelerator, *made = begin()
    model, optimizer, loader = accelerator.prepare(*made)
    for number, (x, y) in enumerate(itertools.islice(forever(loader), 6), 1):
        if number % 2:
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, x, y) / 2)
            continue
        accelerator.backward(loss_of(model, x, y) / 2)
        optimizer.step()
        optimizer.zero_grad()
    return result(accelerator, model)


def by_hand(directory: Path) -> Found:
    """Accumulation by two backwards and then a step."""
    accelerator, *made = begin()
    model, optimizer, loader = accelerator.prepare(*made)
    for number, (x, y) in enumerate(itertools.islice(forever(loader), 6), 1):
        accelerator.backward(loss_of(model, x, y) / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return result(accelerator, model)


def two_losses(directory: Path) -> Found:
    """Two losses of one forward, each with its backward."""
    accelerator, *made = begin()
    model, optimizer, loader = accelerator.prepare(*made)
    for x, y in loader:
        error = model(x) - y
        accelerator.backward(error.square().mean(), retain_graph=True)
        accelerator.backward(error.abs().mean())
        optimizer.step()
        optimizer.zero_grad()
    return result(accelerator, model)


def scheduled(
    name: str, *, prepared: bool = True, together: bool = True, made_after: bool = False, accumulate: int = 1
) -> Feature:
    """A scheduler of one's own: given to `prepare()` or not, made before or of what that returned."""

    def feature(directory: Path) -> Found:
        options = {"gradient_accumulation_steps": accumulate, "step_scheduler_with_optimizer": together}
        accelerator, model, optimizer, loader = begin(**options)
        scheduler = None if made_after else SCHEDULERS[name](optimizer)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        scheduler = accelerator.prepare(scheduler) if prepared else scheduler
        return result(accelerator, model, train(accelerator, model, optimizer, loader, scheduler))

    return feature


def all_at_once(directory: Path) -> Found:
    """Everything is given to one `prepare()`, the model last."""
    accelerator, model, optimizer, loader = begin()
    scheduler = SCHEDULERS["SequentialLR"](optimizer)
    scheduler, optimizer, loader, model = accelerator.prepare(scheduler, optimizer, loader, model)
    return result(accelerator, model, train(accelerator, model, optimizer, loader, scheduler))


def plateau(directory: Path) -> Found:
    """`ReduceLROnPlateau`, of a loss that does not fall."""
    accelerator, model, optimizer, loader = begin(step_scheduler_with_optimizer=False)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = train(accelerator, model, optimizer, loader, after=lambda step: scheduler.step(1.0))
    return result(accelerator, model, rates)


def on_the_old_one(directory: Path) -> Found:
    """The learning rate is set on the optimizer that was given to `prepare()`."""
    accelerator, model, old, loader = begin()
    model, optimizer, loader = accelerator.prepare(model, old, loader)

    def slower(step: int) -> None:
        for group in old.param_groups:
            group["lr"] = 0.02 / (1 + step)

    return result(accelerator, model, train(accelerator, model, optimizer, loader, after=slower))


def averaged(directory: Path, *, module_of: Callable[[Any, nn.Module], nn.Module], **options: Any) -> Found:
    """`AveragedModel` of torch's, of the user's module or of what `prepare()` gives."""
    accelerator, model, optimizer, loader = begin()
    average = AveragedModel(model, **options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    update = lambda step: average.update_parameters(module_of(accelerator, model))  # noqa: E731
    rates = train(accelerator, model, optimizer, loader, after=update)
    return {**result(accelerator, model, rates), "average": numbers(average.module.state_dict())}


def averaged_inside(directory: Path) -> Found:
    """`AveragedModel` of the user's module, updated where its parameters can be read."""
    accelerator, model, optimizer, loader = begin()
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def update(step: int) -> None:
        with model.summon_full_params() if ON_SERVERS else contextlib.nullcontext():
            average.update_parameters(accelerator.unwrap_model(model))

    rates = train(accelerator, model, optimizer, loader, after=update)
    return {**result(accelerator, model, rates), "average": numbers(average.module.state_dict())}


def averaged_states(directory: Path) -> Found:
    """A moving average by state dicts, which each worker has."""
    accelerator, *made = begin()
    model, optimizer, loader = accelerator.prepare(*made)
    average: dict[str, torch.Tensor] = {}

    def update(step: int) -> None:
        for name, now in model.state_dict().items():
            name = name.removeprefix("module.")
            average[name] = average.get(name, now).lerp(now, 0.1)

    rates = train(accelerator, model, optimizer, loader, after=update)
    return {**result(accelerator, model, rates), "average": numbers(average)}


def swa(directory: Path) -> Found:
    """Stochastic weight averaging as torch's documentation has it, with a batch norm, whose statistics follow."""
    accelerator, model, optimizer, loader = begin(norm=True)
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rates = []
    for _ in range(3):
        rates += train(accelerator, model, optimizer, loader, epochs=1)
        with model.summon_full_params() if ON_SERVERS else contextlib.nullcontext():
            average.update_parameters(accelerator.unwrap_model(model))
        scheduler.step()
    update_bn(loader, average)
    return {**result(accelerator, model, rates), "average": numbers(average.module.state_dict())}


def unfrozen(directory: Path) -> Found:
    """The backbone is frozen at first."""
    accelerator, model, optimizer, loader = begin()
    model.backbone.requires_grad_(False)  # type: ignore[operator]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = train(accelerator, model, optimizer, loader, epochs=1)
    accelerator.unwrap_model(model).backbone.requires_grad_(True)
    return result(accelerator, model, first + train(accelerator, model, optimizer, loader, epochs=1))


def a_group_more(directory: Path) -> Found:
    """The backbone's group is added later."""
    accelerator, model, _, loader = begin()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)  # type: ignore[union-attr]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = train(accelerator, model, optimizer, loader, epochs=1)
    model.zero_grad()
    optimizer.add_param_group({"params": list(accelerator.unwrap_model(model).backbone.parameters())})
    return result(accelerator, model, first + train(accelerator, model, optimizer, loader, epochs=1))


def optimizer_after(directory: Path) -> Found:
    """The optimizer is made of the prepared model, and then prepared."""
    accelerator, model, _, loader = begin()
    model, loader = accelerator.prepare(model, loader)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    return result(accelerator, model, train(accelerator, model, optimizer, loader))


def two_optimizers(directory: Path) -> Found:
    """One of the head, one of the backbone."""
    accelerator, model, _, loader = begin()
    kinds = [torch.optim.SGD(part.parameters(), lr=0.05) for part in model.children()]
    model, first, second, loader = accelerator.prepare(model, *kinds, loader)
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return result(accelerator, model)


def resumed(
    directory: Path,
    part: int,
    *,
    scheduler: str = "SequentialLR",
    prepared: bool = True,
    accumulate: int = 1,
    norm: bool = False,
) -> Found:
    """Two epochs, and a state that is saved; then everything anew, and two more."""
    accelerator, model, optimizer, loader = begin(norm, gradient_accumulation_steps=accumulate)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * part)  # which the saved state replaces
    rate = SCHEDULERS[scheduler](optimizer)
    if prepared:
        model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(rate)
    if part:
        accelerator.load_state(str(directory / "state"))
    rates = train(accelerator, model, optimizer, loader, rate)
    if not part:
        accelerator.save_state(str(directory / "state"))
    return result(accelerator, model, rates)


def anew() -> None:
    """Forget the accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


FEATURES: Final[dict[str, Feature]] = {
    "plain": plain,
    "accumulate": lambda where: plain(where, gradient_accumulation_steps=2),
    "accumulate 3": lambda where: plain(where, gradient_accumulation_steps=3),
    "accumulate, no_sync": by_no_sync,
    "accumulate, two backwards": by_hand,
    "two losses": two_losses,
    "bf16": lambda where: plain(where, mixed_precision="bf16", gradient_accumulation_steps=2),
    "batch norm": lambda where: plain(where, norm=True),
    "clip norm": lambda where: clipped(where, by_value=False),
    "clip norm, accumulate": lambda where: clipped(where, by_value=False, accumulate=2),
    "clip value": lambda where: clipped(where, by_value=True),
    **{f"{name}": scheduled(name) for name in SCHEDULERS},
    **{f"{name}, not prepared": scheduled(name, prepared=False) for name in SCHEDULERS},
    "SequentialLR, of the prepared": scheduled("SequentialLR", prepared=False, made_after=True),
    "SequentialLR, step by itself": scheduled("SequentialLR", together=False),
    "SequentialLR, accumulate": scheduled("SequentialLR", accumulate=2),
    "all in one prepare()": all_at_once,
    "ReduceLROnPlateau": plateau,
    "rate on the old optimizer": on_the_old_one,
    "EMA of the module": lambda where: averaged(
        where, module_of=lambda a, m: a.unwrap_model(m), avg_fn=get_ema_avg_fn(0.9)
    ),
    "EMA of the prepared": lambda where: averaged(where, module_of=lambda a, m: m, avg_fn=get_ema_avg_fn(0.9)),
    "EMA inside summon_full_params": averaged_inside,
    "EMA of state dicts": averaged_states,
    "SWA": swa,
    "unfreeze": unfrozen,
    "add_param_group": a_group_more,
    "optimizer of the prepared": optimizer_after,
    "two optimizers": two_optimizers,
}

RESUMED: Final = {
    "resume": resumed,
    "resume, not prepared": functools.partial(resumed, scheduler="ChainedScheduler", prepared=False),
    "resume, OneCycleLR": functools.partial(resumed, scheduler="OneCycleLR"),
    "resume, accumulate": functools.partial(resumed, accumulate=2),
    "resume, batch norm": functools.partial(resumed, norm=True),
}

if __name__ == "__main__":
    run(FEATURES, RESUMED, anew)
