"""`SyncBatchNorm` on ranks that are threads gives what torch's BatchNorm gives for all their batches in one process.

Tests of `parallel/ddp/sync_batch_norm.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest, Misuse
from axon_ps.parallel import DDP, FSDP, SGD, SyncBatchNorm
from axon_ps.testing import run_threads
from mock_ranks import close, on_ranks, rand
from parallel_fakes import FakeGroup

CHANNELS = 3
KINDS: dict[int, Any] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "large eps": {"eps": 0.5, "momentum": 0.7},
}
CASES = [
    *(((2, 1, 4), 2, options) for options in OPTIONS),
    *((batches, 0, "as it is") for batches in ((2, 2), (3, 1), (0, 4), (1, 0, 2), (5,))),
    ((2, 3), 1, "as it is"),
    ((3, 0), 3, "as it is"),
]


def drawn(layer: nn.Module) -> nn.Module:
    """A layer whose weight and bias do something."""
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(rand(CHANNELS, seed=70 + i))
    return layer


def trained(layer: nn.Module, batch: Any) -> list[dict[str, torch.Tensor | None]]:
    """What a layer gives, forward and backward, for two batches, and for one in evaluation if it has statistics."""
    found: list[dict[str, torch.Tensor | None]] = []
    for step in range(2 if layer.running_mean is None else 3):
        layer.train(step < 2)
        x = (batch(step) * (step + 1) + 3.0).requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y * batch(100 + step)).sum().backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
        buffers = {name: b.clone() for name, b in layer.named_buffers()}
        found.append({"y": y.detach(), "dx": x.grad, **grads, **{f"buffer {k}": v for k, v in buffers.items()}})
    return found


@pytest.mark.parametrize(("batches", "spatial", "options"), CASES, ids=str)
def test_equals_one_process_with_the_whole_batch(batches: tuple[int, ...], spatial: int, options: str) -> None:
    shape = (CHANNELS, *(4, 2, 3)[:spatial])
    plain = drawn(KINDS[spatial](CHANNELS, **OPTIONS[options]))
    begin = [sum(batches[:r]) for r in range(len(batches) + 1)]
    expected = trained(copy.deepcopy(plain), lambda step: rand(begin[-1], *shape, seed=step))

    def body(group: ProcessGroup) -> Any:
        layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), group)
        assert isinstance(layer, SyncBatchNorm)
        rows = slice(begin[group.rank], begin[group.rank + 1])
        return trained(layer, lambda step: rand(begin[-1], *shape, seed=step)[rows])

    ranks = on_ranks(len(batches), body)
    for step, now in enumerate(zip(*ranks, strict=True)):
        for name, expected_value in expected[step].items():
            values = [found[name] for found in now]
            if name in ("y", "dx"):
                close(torch.cat(values), expected_value, 2e-5)
            elif name.startswith("buffer"):
                for value in values:
                    close(value.double(), expected_value.double())
                    assert torch.equal(value, values[0])  # the same bits everywhere
            else:
                close(torch.stack(values).sum(0), expected_value, 2e-5)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-10), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_dtypes(dtype: torch.dtype, off: float) -> None:
    x, dy = rand(6, CHANNELS, 5).to(dtype), rand(6, CHANNELS, 5, seed=1).to(dtype)
    given = x.double().clone().requires_grad_()
    expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(given)
    expected.backward(dy.double())

    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(2 * group.rank, 2 * group.rank + 2)
        mine = x[rows].clone().requires_grad_()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y = SyncBatchNorm(CHANNELS, process_group=group, dtype=wide)(mine)
        y.backward(dy[rows])
        assert y.dtype == dtype
        assert mine.grad is not None
        return y.detach().double(), mine.grad.double()

    ys, dxs = zip(*on_ranks(3, body), strict=True)
    close(torch.cat(ys), expected.detach(), off)
    close(torch.cat(dxs), given.grad, off)


def test_values_far_from_zero_keep_their_variance() -> None:
    x = rand(8, CHANNELS) + 1000.0  # E[x^2] - E[x]^2 would have no digit left

    def body(group: ProcessGroup) -> torch.Tensor:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        return layer(x[4 * group.rank :][:4]).detach()

    expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(x.double()).detach()
    close(torch.cat(on_ranks(2, body)).double(), expected, 1e-3)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def step(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        (model(x).square().sum() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_under_ddp_and_no_shard_a_network_trains_as_in_one_process() -> None:
    plain, x = network(), rand(5, 1, 6, 6)
    nets = [network() for _ in range(3)]  # torch's generator is shared by the threads
    step(plain, x, 1 / 3)  # the average over three ranks

    def body(group: ProcessGroup) -> dict[str, torch.Tensor]:
        converted = SyncBatchNorm.convert_sync_batchnorm(nets[group.rank], group)
        model = DDP(converted, group)
        step(model, x[(0, 2, 2)[group.rank] : (2, 2, 5)[group.rank]], 1.0)  # the second has an empty batch
        return {name: value.detach() for name, value in converted.state_dict().items()}

    for state in on_ranks(3, body):
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            close(state[name].double(), value.double(), 1e-4)


def test_under_fsdp_a_network_trains_as_in_one_process() -> None:
    plain, x = network(), rand(5, 1, 6, 6)
    nets = [network() for _ in range(3)]
    step(plain, x, 1 / 3)

    def body(world: World) -> dict[str, torch.Tensor]:
        model = FSDP(SyncBatchNorm.convert_sync_batchnorm(nets[world.rank]), world, unit_types={nn.Conv2d})
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            model(x[(0, 2, 2)[world.rank] : (2, 2, 5)[world.rank]]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    for state in run_threads(body, 3):
        for name, value in plain.state_dict().items():
            close(state[name].double(), value.double(), 1e-4)


def test_inside_fsdp_its_parameters_are_sharded_like_others() -> None:
    group = FakeGroup()
    plain, x = network(), rand(5, 1, 6, 6)
    model = FSDP(SyncBatchNorm.convert_sync_batchnorm(network(), group._group), group)  # type: ignore[arg-type]
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    (grads,) = group.world.steps.grads.values()
    close(grads, torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]), 1e-4)
    buffers = dict(plain.named_buffers())
    assert {name for name, b in model.named_buffers() if torch.allclose(b, buffers[name])} == set(buffers)


def test_converting_keeps_what_a_module_is() -> None:
    group = object()
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.BatchNorm1d(2, affine=False), "b": nn.ReLU()}))
    module.append(nn.SyncBatchNorm(2).requires_grad_(False).eval())
    old = module[2]
    converted: Any = SyncBatchNorm.convert_sync_batchnorm(module, group)  # type: ignore[arg-type]
    assert converted is module
    assert type(converted[1]["a"]) is type(converted[2]) is SyncBatchNorm
    assert converted[2].weight is old.weight
    assert converted[2].running_mean is old.running_mean
    assert not converted[2].training
    assert converted[1]["a"].weight is None
    assert copy.deepcopy(converted)[2].process_group is converted[2].process_group is group
    again: Any = SyncBatchNorm.convert_sync_batchnorm(converted[2])  # a layer alone; another group
    assert again is not converted[2]
    assert (again.process_group, again.weight) == (None, old.weight)
    with pytest.raises(InvalidRequest, match="LazyBatchNorm1d does not know its channels"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_what_cannot_be_normalised_is_said_on_every_rank() -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(InvalidRequest, match="the 2 ranks together have 1"):
            layer(torch.ones(group.rank, CHANNELS))
        wrong = pytest.raises(InvalidRequest, match=r"was given \[2, 4\]; it needs \[N, 3")
        raised = pytest.raises(Disagreement, match=r"rank 1.*was given \[2, 4\]")
        with wrong if group.rank else raised:
            layer(torch.ones(2, CHANNELS + group.rank))
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        assert layer(torch.ones(2, CHANNELS)).shape == (2, CHANNELS)  # the group can go on

    on_ranks(2, body)


def test_without_a_world_only_evaluation_works() -> None:
    layer = SyncBatchNorm(CHANNELS)
    with pytest.raises(Misuse, match="no current world"):
        layer(torch.ones(2, CHANNELS))
    assert layer.eval()(torch.ones(2, CHANNELS)).shape == (2, CHANNELS)
