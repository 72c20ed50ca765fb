"""Runs a program on one rank of one side, and keeps what it computed."""

from __future__ import annotations

import contextlib
import copy
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from program import HYPER, Op, Program
from program_model import DTYPES, WIDTH, Boom, Layer, Module, hook, plain
from sides import Side, Values, built

BATCH = 4
EPSILON = 2.0**-23
"""Of f32."""


@dataclass
class Kept:
    """What a rank has computed.

    Attributes:
        losses: per operation, the losses of its forwards.
        after: per operation, the values after it, if they were asked for.
        values: at the end, or when an error ended it.
        error: what ended it, as text; empty if nothing did.
        kind: the names of the error's class and its bases.
        at: the operation that it came from; -1 = wrapping.
        where: the last lines of the traceback.
        uncommitted: operations whose step did not commit.
    """

    losses: list[list[float]] = field(default_factory=list)
    after: list[Values] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    error: str = ""
    kind: tuple[str, ...] = ()
    at: int = -1
    where: str = ""
    uncommitted: list[int] = field(default_factory=list)


def run(program: Program, side: Side, *, dtype: str | None = None, jitter: int = 0, snapshots: bool = False) -> Kept:
    """Run it to its end, or to its first error.

    Args:
        program: the program.
        side: on which it runs.
        dtype: in place of the module's, for an estimate of what rounding does.
        jitter: seed of changes to the batches that are as small as f32's rounding, for the same; 0 = none.
        snapshots: keep the values after each operation.
    """
    kept = Kept()
    made: list[Any] = []
    try:
        loop = Loop(program, side, kept, dtype, jitter)
        made.append(loop)
        if snapshots:
            kept.after.append(side.values(loop.model))
        for number, op in enumerate(program.loop):
            kept.at = number
            kept.losses.append([])
            loop.perform(op, number)
            if snapshots:
                kept.after.append(side.values(loop.model))
        kept.at = len(program.loop)
        kept.values = side.values(loop.model)
    except Exception as error:
        kept.error = str(error)
        kept.kind = tuple(c.__name__ for c in type(error).__mro__[:-2])
        kept.where = "".join(traceback.format_exception(error)[-6:])[-1800:]
        with contextlib.suppress(Exception):
            kept.values = side.values(made[0].model) if made else {}
    return kept


class Loop:
    """The state of a program that runs."""

    def __init__(self, program: Program, side: Side, kept: Kept, dtype: str | None, jitter: int) -> None:
        self.program, self.side, self.kept, self.jitter = program, side, kept, jitter
        self.dtype = DTYPES[dtype or program.net.dtype]
        module = built(lambda: _module(program, dtype), side.rank if program.first_differ else 0)
        hook(module, after=False)
        self.model = side.wrap(module, unit_types={Layer})
        hook(side.inner(self.model), after=True)
        self.optimizer = self._make_optimizer(program.optimizer)
        self.scheduler = self._make_scheduler()
        self.saved = False

    # ------------------------------------------------------------------ what there is

    def _make_optimizer(self, kind: str) -> torch.optim.Optimizer:
        hyper = HYPER[kind][self.program.hyper if kind == self.program.optimizer else 0]
        params = list(self.model.parameters())
        if self.program.groups == 1:
            return self.side.optimizer(kind, params, **hyper)
        wide, narrow = ([p for p in params if (p.ndim > 1) == many] for many in (True, False))
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": hyper["lr"] / 2}]
        return self.side.optimizer(kind, [g for g in groups if g["params"]], **hyper)

    def _make_scheduler(self) -> Any:
        made = self.optimizer
        match self.program.scheduler:
            case "step":
                return lr_scheduler.StepLR(made, 1, 0.5)
            case "exponential":
                return lr_scheduler.ExponentialLR(made, 0.7)
            case "lambda":
                return lr_scheduler.LambdaLR(made, lambda n: 1 / (n + 1))
            case "cosine":
                return lr_scheduler.CosineAnnealingLR(made, 4)
            case "one cycle":
                return lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=50, pct_start=0.1)
            case "sequential":
                parts = [lr_scheduler.LinearLR(made, 0.1, total_iters=2), lr_scheduler.ExponentialLR(made, 0.5)]
                return lr_scheduler.SequentialLR(made, parts, [2])
        return None

    def _layer(self, number: int) -> nn.Module:
        layer: nn.Module = self.side.inner(self.model).layers[number]
        return layer

    def _batch(self, number: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(1000 * number + 10 * micro + self.side.rank)
        x, y = torch.randn(2, BATCH, WIDTH, generator=made, dtype=torch.float64)
        if self.jitter:
            made = torch.Generator().manual_seed(self.jitter)
            x = x * (1 + EPSILON * torch.randn(x.shape, generator=made, dtype=torch.float64))
        return x.to(self.dtype), y.to(self.dtype)

    # ------------------------------------------------------------------ what is done

    def perform(self, op: Op, number: int) -> None:
        """Do one thing."""
        model, optimizer = self.model, self.optimizer
        match op.kind:
            case "train":
                self._train(op, number)
            case "evaluate":
                grad = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(op.how, torch.enable_grad)
                with grad():
                    x, y = self._batch(number, 0)
                    self._keep((plain(model(x)) - y).square().mean())
            case "mode":
                model.train(op.on)
            case "freeze":
                self._layer(op.block).requires_grad_(op.on)
            case "group":
                if op.how in optimizer.param_groups[0]:
                    optimizer.param_groups[0][op.how] = op.value
            case "zero":
                (optimizer if op.how == "optimizer" else model).zero_grad()
            case "step":
                self._step(number)
            case "load state":
                model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in self._state().items()})
            case "save":
                self.side.save(model, optimizer)
                self.saved = True
            case "load":
                if self.saved:
                    self.side.load(model, optimizer)
            case "optimizer":
                self._remake(op)
            case "edit":
                self._edit(op)

    def _state(self) -> Values:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def _train(self, op: Op, number: int) -> None:
        optimizer, inner = self.optimizer, self.side.inner(self.model)
        if op.zero == "before":
            optimizer.zero_grad()
        for layer in inner.layers:
            layer.used = op.flag == "all" or (op.flag == "rank 1" and self.side.rank == 1)
        try:
            for micro in range(op.micro):
                inside = (
                    self.side.no_sync(self.model) if op.no_sync and micro < op.micro - 1 else contextlib.nullcontext()
                )
                with inside:
                    self._backward(op, *self._batch(number, micro))
        except Boom:
            optimizer.zero_grad()
            return
        if op.skip == "drop":
            optimizer.zero_grad()
            return
        if op.clip:
            self.side.clip(self.model, op.clip)
        self._step(number)
        if self.scheduler is not None:
            self.scheduler.step()
        if op.zero in ("after", "zeros"):
            optimizer.zero_grad(set_to_none=op.zero == "after")

    def _step(self, number: int) -> None:
        if not getattr(self.optimizer.step(), "committed", True):
            self.kept.uncommitted.append(number)

    def _backward(self, op: Op, x: torch.Tensor, y: torch.Tensor) -> None:
        model = self.model
        raises, explodes = (op.at if op.skip == "forward" else -1), (op.at if op.skip == "backward" else -1)
        if op.loss == "penalty":
            x = x.clone().requires_grad_()
        out = plain(model(x, raises, explodes))
        loss = (out - y).square().mean()
        match op.loss:
            case "auxiliary":
                parts = [layer.aux for layer in self.side.inner(model).layers if layer.aux is not None]
                loss = loss + sum(parts, start=loss.new_zeros(()))
            case "penalty":
                (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + grad.square().mean()
            case "two forwards":
                loss = loss + (plain(model(x * 0.5)) - y).square().mean()
            case "again":
                (loss / op.micro).backward(retain_graph=True)
            case "parts":
                (out.square().mean() / op.micro).backward(retain_graph=True)
            case "attribute":
                loss = (self.side.inner(model).kept - y).square().mean()
        (loss / op.micro).backward()
        self._keep(loss)

    def _keep(self, loss: torch.Tensor) -> None:
        self.kept.losses[-1].append(float(loss.detach()))

    def _remake(self, op: Op) -> None:
        old = self.optimizer
        self.optimizer = self._make_optimizer(op.how if op.how in HYPER else self.program.optimizer)
        if op.how == "carried":
            self.optimizer.load_state_dict(copy.deepcopy(old.state_dict()))
        self.scheduler = self._make_scheduler()

    def _edit(self, op: Op) -> None:
        layer = self._layer(op.block)
        full = getattr(self.model, "summon_full_params", contextlib.nullcontext)
        with torch.no_grad(), full() if op.how == "summon" else contextlib.nullcontext():
            for param in layer.parameters():
                match op.how:
                    case "mul" | "summon":
                        param.mul_(0.5)
                    case "clamp":
                        param.clamp_(-0.2, 0.2)
                    case "copy":
                        param.copy_(torch.full_like(param, 0.25))
                    case "data":
                        param.data = torch.full_like(param, 0.25)


def _module(program: Program, dtype: str | None) -> Module:
    """The module in its own dtype; for an estimate of rounding, the same values in another."""
    module = Module(program.net)
    if dtype is not None:
        module.compute_in(DTYPES[dtype])
    return module
