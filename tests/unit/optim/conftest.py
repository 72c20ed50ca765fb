"""Runs an optimizer of ours and one of torch side by side on the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from axon_ps.optim import create
from axon_ps.types import Array, DType

TORCH = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
FLAGS = ("nesterov", "maximize", "amsgrad", "centered")


def torch_options(hyper: Mapping[str, float]) -> dict[str, Any]:
    """Our flat hyperparameters as torch's keyword arguments."""
    options: dict[str, Any] = {k: bool(v) if k in FLAGS else v for k, v in hyper.items() if not k.startswith("beta")}
    if "beta1" in hyper:
        options["betas"] = (hyper["beta1"], hyper["beta2"])
    return options


def gradients(numel: int, updates: int) -> list[Array]:
    """Per update, grad: f32[numel], of magnitudes from 1e-4 to 10."""
    rng = np.random.default_rng(numel + updates)
    scale = np.float32(10.0) ** rng.uniform(-4, 1, numel).astype(np.float32)
    return [rng.standard_normal(numel, dtype=np.float32) * scale for _ in range(updates)]


@dataclass
class Result:
    """Parameters and state by name after the last update.

    Attributes:
        wire: the wire copy; ours only.
        peak: per array and element, the largest magnitude it ever had; torch's only.
    """

    param: Array
    state: dict[str, Array]
    wire: Array = field(default_factory=lambda: np.empty(0, np.uint16))
    peak: dict[str, Array] = field(default_factory=dict)


def run_ours(
    name: str,
    groups: Sequence[Mapping[str, float]],
    numel: int,
    updates: int,
    *,
    group: int = 0,
    grad_scale: float = 1.0,
    wire_dtype: DType = DType.BF16,
    ranges: Callable[[Callable[[slice], None]], None] = lambda one: one(slice(None)),
) -> Result:
    """Updates a slice all of whose elements belong to `groups[group]`; `ranges` cuts it."""
    optimizer = create(name)
    values = [optimizer.validate(g) for g in groups]
    names = optimizer.state_names(values)
    param = np.random.default_rng(0).standard_normal(numel, dtype=np.float32)
    state = tuple(np.full(numel, optimizer.initial_state(n, values), np.float32) for n in names)
    wire = np.zeros(numel, wire_dtype.numpy)
    for update, grad in enumerate(gradients(numel, updates), start=1):

        def one(elements: slice, grad: Array = grad, update: int = update) -> None:
            states = tuple(s[elements] for s in state)
            optimizer.apply(
                param[elements], grad[elements], states, wire[elements], wire_dtype, values[group], update, grad_scale
            )

        ranges(one)
    return Result(param, dict(zip(names, state, strict=True)), wire)


def run_torch(
    name: str, hyper: Mapping[str, float], numel: int, updates: int, *, grad_scale: float = 1.0, **options: Any
) -> Result:
    """The same with torch.optim; gradients are scaled in f32 beforehand."""
    param = torch.from_numpy(np.random.default_rng(0).standard_normal(numel, dtype=np.float32)).requires_grad_()
    optimizer = getattr(torch.optim, TORCH[name])([param], **torch_options(hyper), **options)
    peak = {"param": param.detach().abs()}
    for grad in gradients(numel, updates):
        param.grad = torch.from_numpy(grad * np.float32(grad_scale))
        optimizer.step()
        state = {k: v for k, v in optimizer.state[param].items() if v is not None and v.ndim}
        for name, now in [("param", param.detach()), *state.items()]:
            peak[name] = torch.maximum(peak.get(name, now.abs()), now.abs())
    return Result(
        param.detach().numpy(),
        {k: v.numpy() for k, v in state.items()},
        peak={k: v.numpy() for k, v in peak.items()},
    )


def assert_close(ours: Result, theirs: Result) -> None:
    """1e-6 relative, element by element, to the largest magnitude the element ever had.

    Not to the last one: an f32 sum that passed 1 and came back to 1e-6 has kept the rounding of 1, torch's as ours.
    """
    for name, a, b in [("param", ours.param, theirs.param), *((n, ours.state[n], s) for n, s in theirs.state.items())]:
        relative = np.abs(a - b) / np.maximum(theirs.peak[name], np.finfo(np.float32).tiny)
        assert a.shape == b.shape
        assert relative.max(initial=0.0) < 1e-6, f"{name}: {relative.max()} at {relative.argmax()}"


def assert_same_bits(a: Result, b: Result) -> None:
    """Parameters, state and wire copy are equal, bit for bit."""
    assert a.param.tobytes() == b.param.tobytes()
    assert a.wire.tobytes() == b.wire.tobytes()
    assert {n: s.tobytes() for n, s in a.state.items()} == {n: s.tobytes() for n, s in b.state.items()}


@dataclass(frozen=True)
class Oracle:
    """The functions above, for tests."""

    ours: Callable[..., Result] = run_ours
    torch: Callable[..., Result] = run_torch
    assert_close: Callable[[Result, Result], None] = assert_close
    assert_same_bits: Callable[[Result, Result], None] = assert_same_bits

    def check(self, name: str, hyper: Mapping[str, float], numel: int = 257, updates: int = 25, **options: Any) -> None:
        """Ours is torch's, in the single-tensor and, if asked for, the fused implementation."""
        grad_scale = options.pop("grad_scale", 1.0)
        ours = run_ours(name, [hyper], numel, updates, grad_scale=grad_scale)
        assert_close(ours, run_torch(name, hyper, numel, updates, grad_scale=grad_scale, **options))


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Ours and torch's, side by side."""
    return Oracle()
