"""Loops: how people accumulate, drop, skip and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from case_parts import Batch, Block, batches, mse, small, three
from case_table import SHARDED, Wrong, add
from sides import Side, Values, built

Loop = Callable[[Side, nn.Module, torch.optim.Optimizer, list[Batch]], None]


def no_context(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data[:3]:
        (mse(model, x, y) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_no_sync(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for i, (x, y) in enumerate(data[:5]):
        last = i in (2, 4)
        with contextlib.nullcontext() if last else side.no_sync(model):
            (mse(model, x, y) / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def all_in_no_sync(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    with side.no_sync(model):
        for x, y in data[:2]:
            mse(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def never_zero(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data[:3]:
        mse(model, x, y).backward()
        optimizer.step()


def zero_first(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data[:3]:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()


def step_alone(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    optimizer.step()
    mse(model, *data[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def dropped(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    mse(model, *data[0]).backward()
    optimizer.zero_grad()
    mse(model, *data[1]).backward()
    optimizer.step()


def dropped_by_model(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    mse(model, *data[0]).backward()
    model.zero_grad()
    mse(model, *data[1]).backward()
    optimizer.step()


def zeros(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data[:3]:
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def summed(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    sum((mse(model, x, y) for x, y in data[:3]), start=torch.zeros(())).backward()
    optimizer.step()
    optimizer.zero_grad()


def closure(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    def compute() -> float:
        optimizer.zero_grad()
        loss = mse(model, *data[0])
        loss.backward()
        return loss.item()

    if side.workers == 1 or hasattr(side, "world"):
        optimizer.step(compute)
    else:  # what averages for plain torch comes before the closure
        compute()
        optimizer.step()


def forward_dropped(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    model(data[0][0])
    model(data[1][0])
    mse(model, *data[2]).backward()
    optimizer.step()
    model(data[3][0])
    optimizer.zero_grad()
    mse(model, *data[4]).backward()
    optimizer.step()


def two_losses(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    out = model(data[0][0])
    out.square().mean().backward(retain_graph=True)
    (out - data[0][1]).abs().mean().backward()
    optimizer.step()


def twice(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    loss = mse(model, *data[0])
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def clipped(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for x, y in data[:3]:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        side.clip(model, 0.1)
        optimizer.step()


def clipped_in_part(side: Side, model: Any, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    optimizer.zero_grad()
    mse(model, *data[0]).backward()
    side.clip(side.inner(model)[0], 0.1)
    optimizer.step()


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("a bad batch")


def _skips(at: str) -> Loop:
    """The usual recipe for a batch that fails: `except RuntimeError: optimizer.zero_grad(); continue`."""

    def loop(side: Side, model: Any, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
        def fail(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
            if at == "forward":
                raise RuntimeError("a bad batch")
            return _Bad.apply(out)

        for i, (x, y) in enumerate(data[:4]):
            hook = side.inner(model)[1].register_forward_hook(fail) if i == 1 else None
            try:
                mse(model, x, y).backward()
            except RuntimeError as error:
                if "a bad batch" not in str(error):
                    raise
                optimizer.zero_grad()
                continue
            finally:
                if hook is not None:
                    hook.remove()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def _run(side: Side, loop: Loop, make: Callable[[], nn.Module], optimizer: str, hyper: dict[str, float]) -> Values:
    model = side.wrap(built(make), unit_types=(Block,))
    loop(side, model, side.optimizer(optimizer, model.parameters(), **hyper), batches(side))
    return side.values(model)


for _name, _loop, _says in (
    ("three backwards without no_sync, one step", no_context, ""),
    ("accumulation with no_sync", with_no_sync, ""),
    ("every backward inside no_sync, then a step", all_in_no_sync, r"every backward of a step inside"),
    ("zero_grad before the backward", zero_first, ""),
    ("a step without a backward", step_alone, ""),
    ("a gradient dropped by optimizer.zero_grad()", dropped, ""),
    ("a gradient dropped by model.zero_grad()", dropped_by_model, ""),
    ("several losses summed, one backward", summed, ""),
    ("a closure", closure, ""),
    ("forwards without a backward", forward_dropped, ""),
    ("two losses of one forward, one after the other", two_losses, ""),
    ("a backward twice with retain_graph", twice, ""),
    ("gradients are clipped", clipped, ""),
    ("gradients of some parameters are clipped", clipped_in_part, r"of some of them an error"),
    ("a batch that fails in forward is skipped", _skips("forward"), ""),
    ("a batch that fails in backward is skipped", _skips("backward"), r"is skipped after an error"),
):
    add(
        f"loops: {_name}",
        lambda side, loop=_loop, make=three if "skipped" in _name or "some" in _name else small: _run(
            side, loop, make, "SGD", {"lr": 0.1}
        ),
        says=_says,
        **({"wrappers": SHARDED} if "inside no_sync, then" in _name else {}),  # torch's DDP does not average then
    )
for _optimizer, _hyper in (("SGD", {"lr": 0.1}), ("AdamW", {"lr": 0.01})):
    add(
        f"loops: nobody calls zero_grad, {_optimizer}",
        lambda side, o=_optimizer, h=_hyper: _run(side, never_zero, small, o, h),
        says=r"zero_grad",
    )
    add(
        f"loops: zero_grad(set_to_none=False), {_optimizer}",
        lambda side, o=_optimizer, h=_hyper: _run(side, zeros, small, o, h),
    )


def _one_rank_skips(side: Side) -> Values:
    """Rank 0's batch fails in backward: the step counts for nobody, and the later ones do; nobody hangs."""
    model = side.wrap(built(three), unit_types=(Block,))
    optimizer: Any = side.optimizer("SGD", model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(side)[:3]):
        bad = i == 1
        if bad and not hasattr(side, "world"):
            continue
        hook = None
        if bad and side.rank == 0:
            hook = side.inner(model)[1].register_forward_hook(lambda _, __, out: _Bad.apply(out))
        try:
            mse(model, x, y).backward()
        except RuntimeError as error:
            if "a bad batch" not in str(error):
                raise
            optimizer.zero_grad()
        if hook is not None:
            hook.remove()
        if getattr(optimizer.step(), "committed", not bad) == bad:
            raise Wrong(f"the step of batch {i} {'committed, and a worker withdrew' if bad else 'did not commit'}")
        optimizer.zero_grad()
    return side.values(model)


add(
    "loops: a batch that fails on rank 0 alone, which steps without it",
    _one_rank_skips,
    wrappers=SHARDED,
    workers=(2, 3),
    says=r"is skipped after an error",
)


def _votes_differ(side: Side) -> Values:
    """A learning rate that differs on one rank: an error that names it, or none of it commits; not in silence."""
    model = side.wrap(built(small))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    if not hasattr(side, "world"):
        raise RuntimeError("ranks that apply different rates have different models")
    optimizer.param_groups[0]["lr"] = 0.1 if side.rank == 0 else 0.2
    for x, y in batches(side)[:10] * 3:
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise Wrong("thirty steps with a rate that differs, and no error")


add("loops: a rank's learning rate differs", _votes_differ, wrappers=SHARDED[:3], workers=(2, 3))


# ---------------------------------------------------------------------- several models


def _pair(side: Side) -> tuple[Any, Any]:
    """A body and a head, each wrapped by itself."""
    names: tuple[dict[str, str], ...] = ({"name": "body"}, {"name": "head"}) if hasattr(side, "world") else ({}, {})
    body = side.wrap(built(lambda: nn.Sequential(Block(), Block())), unit_types=(Block,), **names[0])
    head = side.wrap(built(lambda: nn.Sequential(Block(), nn.Linear(8, 1)), 1), unit_types=(Block,), **names[1])
    return body, head


def _of_both(side: Side, body: nn.Module, head: nn.Module) -> Values:
    return {f"{n}.{k}": v for n, model in (("body", body), ("head", head)) for k, v in side.values(model).items()}


def _one_loss(side: Side) -> Values:
    body, head = _pair(side)
    first = side.optimizer("AdamW", body.parameters(), lr=0.01)
    second = side.optimizer("SGD", head.parameters(), lr=0.1)
    for x, y in batches(side)[:3]:
        first.zero_grad()
        second.zero_grad()
        (head(body(x)) - y).square().mean().backward()
        first.step()
        second.step()
    return _of_both(side, body, head)


def _adversaries(side: Side, *, frozen: bool) -> Values:
    """A critic that is frozen in the generator's step, or whose gradients of it are dropped; it steps more often."""
    generator, critic = _pair(side)
    makes = side.optimizer("Adam", generator.parameters(), lr=0.01)
    judges = side.optimizer("RMSprop", critic.parameters(), lr=0.01)
    for step, (x, _) in enumerate(batches(side)[:4]):
        critic.requires_grad_(True)
        judges.zero_grad()
        made = generator(x)
        (critic(made.detach()).square().mean() + (critic(x * 2) - 1).square().mean()).backward()
        judges.step()
        judges.zero_grad()
        if step % 2:
            critic.requires_grad_(not frozen)
            makes.zero_grad()
            (critic(made) - 1).square().mean().backward()
            makes.step()
    return _of_both(side, generator, critic)


def _scaler(side: Side, model: Any) -> Any:
    if not hasattr(side, "world"):
        return torch.amp.GradScaler("cpu", init_scale=1024.0)
    from axon_ps.parallel import GradScaler

    return GradScaler(model, init_scale=1024.0)


def _scaled_at_times(side: Side) -> Values:
    """The losses of both models are scaled by one scaler in the first steps, that of the head alone later."""
    body, head = _pair(side)
    first = side.optimizer("SGD", body.parameters(), lr=0.1)
    second = side.optimizer("SGD", head.parameters(), lr=0.1)
    scaler = _scaler(side, body)
    for step, (x, y) in enumerate(batches(side)[:5]):
        first.zero_grad()
        loss = body(x).square().mean()
        if step < 3:
            scaler.scale(loss).backward()
            scaler.step(first)
        else:
            loss.backward()
            first.step()
        scaled = scaler.scale(mse(head, x, y))
        second.zero_grad()  # after the loss was scaled
        scaled.backward()
        scaler.step(second)
        scaler.update()
    return _of_both(side, body, head)


add("loops: one scaler of two models, of one of them in some steps alone", _scaled_at_times, wrappers=SHARDED[:3])
add("loops: two models and one loss", _one_loss)
for _frozen in (True, False):
    add(
        f"loops: adversaries, the critic {'frozen' if _frozen else 'not frozen'} in the generator's step",
        lambda side, f=_frozen: _adversaries(side, frozen=f),
    )
