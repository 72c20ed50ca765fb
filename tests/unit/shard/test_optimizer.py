"""Against torch.optim: parameter groups cut across slices and chunks, schedules, clipping, units without gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from axon_ps.types import Array, DType, OptimizerSpec
from engine_driver import Servers, apply, commit_of, job_of, layout_of

torch = pytest.importorskip("torch")

# Parameters that begin and end inside chunks (of 64) and slices, several in one chunk and one over several.
LAYOUT = layout_of([200, 3, 70], [1, 130], [40, 40, 40])
GROUP_OF = (0, 1, 0, 1, 1, 0, 1, 0)
STEPS = 5


def run(
    make: Callable[[list[dict[str, Any]]], Any],
    name: str,
    groups: Sequence[dict[str, float]],
    *,
    num_servers: int = 3,
    absent: Callable[[int, int], bool] = lambda step, unit: False,
    lr_of: Callable[[int, float], float] = lambda step, lr: lr,
    clip: Sequence[float] = (1.0,) * STEPS,
) -> tuple[list[Array], list[Array]]:
    """The same steps on the servers and in torch: the parameters of both, unit by unit."""
    rng = np.random.default_rng(11)
    first = [rng.standard_normal(u.numel).astype(np.float32) for u in LAYOUT.units]
    spec = job_of(LAYOUT)
    servers = Servers(spec, num_servers, optimizer=OptimizerSpec(name=name, groups=tuple(groups), group_of=GROUP_OF))
    servers.upload(first)
    flat = [(u, p) for u, p in LAYOUT.parameters()]
    tensors = [torch.nn.Parameter(torch.from_numpy(first[u][p.offset : p.end].copy())) for u, p in flat]
    theirs = make(
        [
            {"params": [t for t, g in zip(tensors, GROUP_OF, strict=True) if g == index], **_torch_names(group)}
            for index, group in enumerate(groups)
        ]
    )
    for step in range(STEPS):
        grads: list[Array | None] = [
            None if absent(step, u) else rng.standard_normal(unit.numel).astype(np.float32)
            for u, unit in enumerate(LAYOUT.units)
        ]
        for u in range(len(LAYOUT.units)):
            servers.push(u, 0, grads[u])
        servers.commit([{**g, "lr": lr_of(step, g["lr"])} for g in groups], clip[step])
        for tensor, (u, p) in zip(tensors, flat, strict=True):
            grad = grads[u]
            tensor.grad = None if grad is None else torch.from_numpy(grad[p.offset : p.end] * np.float32(clip[step]))
        for theirs_group, group in zip(theirs.param_groups, groups, strict=True):
            theirs_group["lr"] = lr_of(step, group["lr"])
        theirs.step()
    ours = [servers.values(u) for u in range(len(LAYOUT.units))]
    expected = [
        np.concatenate([t.detach().numpy() for t, (u, _) in zip(tensors, flat, strict=True) if u == unit])
        for unit in range(len(LAYOUT.units))
    ]
    return ours, expected


def _torch_names(group: dict[str, float]) -> dict[str, Any]:
    values: dict[str, Any] = {k: v for k, v in group.items() if k not in ("beta1", "beta2")}
    if "beta1" in group:
        values["betas"] = (group["beta1"], group["beta2"])
    return values


def assert_close(ours: list[Array], expected: list[Array]) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


ADAMW = [
    {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.0},
]


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_adamw_with_two_groups(num_servers: int) -> None:
    assert_close(*run(torch.optim.AdamW, "adamw", ADAMW, num_servers=num_servers))


def test_sgd_with_momentum_in_one_group_only() -> None:
    groups = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}]
    assert_close(*run(lambda g: torch.optim.SGD(g, lr=0.1), "sgd", groups))


def test_a_schedule_changes_every_step() -> None:
    assert_close(*run(torch.optim.AdamW, "adamw", ADAMW, lr_of=lambda step, lr: lr / (step + 1)))


def test_the_clip_factor_scales_the_gradient() -> None:
    assert_close(*run(torch.optim.AdamW, "adamw", ADAMW, clip=(1.0, 0.5, 0.1, 1.0, 0.25)))


def test_a_unit_without_gradient_is_a_parameter_whose_grad_is_none() -> None:
    """Neither weight decay nor moments nor the bias correction's step move."""
    assert_close(*run(torch.optim.AdamW, "adamw", ADAMW, absent=lambda step, unit: (step + unit) % 3 == 0))


def test_momentum_that_is_turned_on_later_gets_its_buffer() -> None:
    rng = np.random.default_rng(1)
    layout = layout_of([50])
    servers = Servers(job_of(layout), optimizer=OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=(0,)))
    first = rng.standard_normal(50).astype(np.float32)
    servers.upload([first])
    grad = rng.standard_normal(50).astype(np.float32)
    servers.train_step([[grad]], [{"lr": 0.1}])
    assert not servers.engines[0].slices[0].master.state
    servers.train_step([[grad]], [{"lr": 0.1, "momentum": 0.5}])
    servers.train_step([[grad]], [{"lr": 0.1, "momentum": 0.5}])
    servers.train_step([[grad]], [{"lr": 0.1, "momentum": 0.0}])
    assert np.allclose(servers.values(0), first - np.float32(0.1) * grad * (1 + 1 + 1.5 + 1), atol=1e-6)


def test_elements_of_no_group_stay_but_travel() -> None:
    layout = layout_of([50, 50])
    spec = job_of(layout, chunk_numel=32, param=DType.BF16)
    servers = Servers(spec, optimizer=OptimizerSpec(name="sgd", groups=({"lr": 1.0},), group_of=(0, -1)))
    servers.upload([np.full(100, 3.0, np.float32)])
    servers.train_step([[np.ones(100, np.float32)]])
    got = (servers.values(0).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(got, np.repeat(np.float32([2.0, 3.0]), 50))


@pytest.mark.parametrize("param", [DType.F32, DType.BF16, DType.F16])
def test_frames_hold_the_rounded_masters(param: DType) -> None:
    layout = layout_of([100], [33], frozen=[1])
    servers = Servers(job_of(layout, chunk_numel=32, param=param))
    rng = np.random.default_rng(5)
    first = [rng.standard_normal(u.numel).astype(np.float32) for u in layout.units]
    servers.upload(first)
    for _ in range(2):
        for unit in range(2):
            master = servers.engines[0].slices[unit].master.values
            expected = {
                DType.F32: lambda m=master: m.view(np.uint8),
                DType.BF16: lambda m=master: torch.from_numpy(m).bfloat16().view(torch.uint8).numpy(),
                DType.F16: lambda m=master: m.astype(np.float16).view(np.uint8),
            }[param]()
            assert servers.values(unit).tobytes() == expected.tobytes()
        servers.train_step([[rng.standard_normal(100).astype(np.float32), None]])


def test_a_dtype_of_the_callers_choice_is_encoded_on_demand() -> None:
    servers = Servers(job_of(layout_of([100]), chunk_numel=64, param=DType.BF16))
    values = np.linspace(-3, 3, 100).astype(np.float32)
    servers.upload([values])
    (engine,) = servers.engines
    before = engine.statistics()["encodings"]
    frame = engine.parameters.encode(engine.slices[0], 1, DType.F32)
    assert values[64:].tobytes() in frame
    assert engine.statistics()["encodings"] == before + 1


@pytest.mark.parametrize(
    ("name", "make", "hyper"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), {"momentum": 0.9}),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), {}),
        ("rmsprop", lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1), {}),
    ],
)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_parameters_without_a_gradient_are_left_alone(
    name: str, make: Callable[[Any], Any], hyper: dict[str, float], num_servers: int
) -> None:
    """Values, moments and counts of updates, whatever slices and chunks they are cut into."""
    numels = (7, 40, 5, 33)
    layout = layout_of(numels[:2], numels[2:])
    spec = OptimizerSpec(name=name, groups=({"lr": 0.1, "weight_decay": 0.1, **hyper},), group_of=(0, 0, 0, 0))
    servers = Servers(job_of(layout, chunk_numel=16), num_servers, optimizer=spec)
    servers.upload([np.ones(unit.numel, np.float32) for unit in layout.units])
    params = [torch.nn.Parameter(torch.ones(n)) for n in numels]
    optimizer, rng = make(params), np.random.default_rng(3)
    for untouched in ((1,), (0, 3), (), (1, 2), (0, 1)):
        grads = [rng.standard_normal(n).astype(np.float32) for n in numels]
        for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = None if number in untouched else torch.from_numpy(grad)
            grad *= number not in untouched
        optimizer.step()
        for unit in (0, 1):
            absent = {2 * unit, 2 * unit + 1} <= set(untouched)
            servers.push(unit, 0, None if absent else np.concatenate(grads[2 * unit : 2 * unit + 2]))
        for engine in servers.engines:
            apply(engine, dataclasses.replace(commit_of(engine), untouched=untouched))
    for unit in (0, 1):
        expected = torch.cat(params[2 * unit : 2 * unit + 2]).detach().numpy()
        np.testing.assert_allclose(servers.values(unit), expected, rtol=1e-5, atol=1e-6)
