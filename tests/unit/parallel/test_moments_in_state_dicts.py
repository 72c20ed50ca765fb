"""Moments on the servers in torch's state dicts, and back. Tests of `parallel/fsdp2/moments.py`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from axon_ps import World
from axon_ps.errors import AxonError, CheckpointError, Disagreement, InvalidRequest, Misuse, StepAborted
from axon_ps.parallel import sharded_model
from axon_ps.parallel.fsdp.on_servers.served_masters import ServedMasters
from axon_ps.parallel.fsdp2.moments import StateOnServers
from axon_ps.testing import run_threads
from composed_model import INPUTS, ROWS, STEPS, TARGETS, Model, State, difference, shard

HALF = STEPS // 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.2),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m.emb.parameters(), "momentum": 0.9}, {"params": m.blocks.parameters()}], lr=0.1
    ),
}
MESSAGE = r"the state dict has exp_avg, exp_avg_sq, step of a parameter of shape \[16, 8\], and sgd .* has nothing"


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, size: int = 1) -> State:
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for step in steps:
        nn.functional.mse_loss(model(INPUTS[step, rows]), TARGETS[step, rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def states_of(optimizer: torch.optim.Optimizer) -> State:
    """The moments, by name."""
    states = optimizer.state_dict()["state"]
    return {f"{key}.{name}": value for key, state in states.items() for name, value in state.items()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_they_are_those_of_torch_and_training_goes_on_from_them(name: str) -> None:
    make = OPTIMIZERS[name]
    plain = Model()
    theirs = make(plain)
    go_on(plain, theirs, range(HALF))
    half, values = copy.deepcopy(theirs.state_dict()), copy.deepcopy(plain.state_dict())
    moments = copy.deepcopy(states_of(theirs))
    end = go_on(plain, theirs, range(HALF, STEPS))

    def run(world: World) -> None:
        place = world.rank, world.world_size
        model = shard(Model())
        optimizer = make(model)
        go_on(model, optimizer, range(HALF), *place)
        saved, saved_values = optimizer.state_dict(), model.state_dict()
        if moments:
            torch.testing.assert_close(states_of(optimizer), moments, rtol=1e-5, atol=1e-5)
        for state, start in ((saved, saved_values), (half, values)):  # ours, and torch's own
            another = shard(Model())
            resumed = make(another)
            sharded_model(another)
            resumed.load_state_dict(state)
            another.load_state_dict(start)
            assert difference(go_on(another, resumed, range(HALF, STEPS), *place), end) < 1e-5
            assert sharded_model(another).version == STEPS - HALF

    run_threads(run, 2)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_worker_alone_reads_them_from_several_servers(name: str) -> None:
    plain = Model()
    theirs = OPTIMIZERS[name](plain)
    go_on(plain, theirs, range(HALF))

    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS[name](model)
        go_on(model, optimizer, range(HALF), world.rank, 2)
        if world.rank == 1:
            torch.testing.assert_close(states_of(optimizer), states_of(theirs), rtol=1e-5, atol=1e-5)
        go_on(model, optimizer, range(HALF, STEPS), world.rank, 2)

    run_threads(run, 2, shards=3)


def test_they_are_not_those_of_two_versions() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS["AdamW"](model)
        go_on(model, optimizer, range(1))
        masters = sharded_model(model).runtime.masters
        assert isinstance(masters, ServedMasters)
        found = masters.moments([(0, {"exp_avg": 0.0}), (1, {"exp_avg": 0.0})])
        next(found)
        go_on(model, optimizer, range(1, 2))
        with pytest.raises(StepAborted, match="changed while they were read"):
            next(found)

    run_threads(run, 1)


@pytest.mark.parametrize("flat", [True, False])
def test_the_functions_of_dcp_make_no_step(flat: bool) -> None:
    """torch's make one of zero gradients if `optimizer.state` is empty."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS["AdamW"](model)
        empty = get_optimizer_state_dict(model, optimizer, options=options)
        assert empty if flat else len(empty["state"]) == len(list(model.parameters()))
        assert sharded_model(model).version == 0
        middle = go_on(model, optimizer, range(HALF))
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        end = go_on(model, optimizer, range(HALF, STEPS))
        another = shard(Model())
        resumed = OPTIMIZERS["AdamW"](another)
        set_optimizer_state_dict(another, resumed, saved, options=options)  # before the first use
        another.load_state_dict(middle)
        assert sharded_model(another).version == 0
        assert difference(go_on(another, resumed, range(HALF, STEPS)), end) == 0

    run_threads(run, 1)


@pytest.mark.parametrize("full", [True, False])
def test_values_and_moments_come_back_together(full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)

    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS["SGD momentum"](model)
        go_on(model, optimizer, range(HALF), world.rank, 2)
        values, moments = get_state_dict(model, optimizer, options=options)
        end = go_on(model, optimizer, range(HALF, STEPS), world.rank, 2)
        set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments, options=options)
        assert difference(go_on(model, optimizer, range(HALF, STEPS), world.rank, 2), end) == 0

    run_threads(run, 2)


def test_those_of_another_type_are_refused_on_every_worker() -> None:
    def run(world: World) -> None:
        model, other = shard(Model()), shard(Model())
        saved = OPTIMIZERS["AdamW"](other).state_dict()
        optimizer = OPTIMIZERS["SGD momentum"](model)
        with pytest.raises(InvalidRequest, match=MESSAGE):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        mine = optimizer.state_dict()
        if world.rank == 1:
            mine["state"][0]["momentum_buffer"] = torch.ones(3)
        with pytest.raises(AxonError, match=r"momentum_buffer' has shape \[3\] in the state dict") as caught:
            optimizer.load_state_dict(mine)
        assert type(caught.value) is (InvalidRequest if world.rank == 1 else Disagreement)

    run_threads(run, 2)


def test_an_optimizer_that_takes_anothers_place_has_new_ones() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        first = OPTIMIZERS["AdamW"](model)
        go_on(model, first, range(HALF))
        saved = first.state_dict()
        second = OPTIMIZERS["AdamW"](model)
        assert difference(states_of(second), {name: torch.zeros(()) for name in states_of(second)}) == 0
        second.load_state_dict(saved)
        assert difference(states_of(second), states_of(first)) == 0
        assert second.state_dict()["state"][0]["step"] == HALF

    run_threads(run, 1)


def test_a_state_dict_without_moments_leaves_them() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS["AdamW"](model)
        go_on(model, optimizer, range(HALF))
        before, saved = states_of(optimizer), optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 3.0
        optimizer.load_state_dict({**saved, "state": {}})
        assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
        assert difference(states_of(optimizer), before) == 0

    run_threads(run, 1)


def test_a_directory_that_cannot_be_reached_is_named_with_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = OPTIMIZERS["AdamW"](model)
        go_on(model, optimizer, range(1))

        def fail(uri: str) -> None:
            raise CheckpointError(f"{uri} cannot be written")

        monkeypatch.setattr(world, "save_checkpoint", fail)
        saved = optimizer.state_dict()
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            optimizer.load_state_dict(saved)
        assert "set TMPDIR" in caught.value.__notes__[0]
        assert not list(tmp_path.iterdir())

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_threads(run, 1)


def test_the_state_has_shapes_and_begins_anew() -> None:
    begun: list[int] = []
    weight, bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    state = StateOnServers({weight: ["exp_avg", "step"]}, lambda: begun.append(1))
    assert (len(state), list(state)) == (1, [weight])
    assert {name: (tuple(t.shape), t.is_meta) for name, t in state[weight].items()} == {
        "exp_avg": ((2, 3), True),
        "step": ((), True),
    }
    assert bias not in state
    assert state
    state.clear()
    assert begun == [1]


def test_a_state_is_not_set() -> None:
    model = shard(Model())
    optimizer = OPTIMIZERS["AdamW"](model)
    with pytest.raises(Misuse, match="load_state_dict"):
        optimizer.state = {next(iter(model.parameters())): {}}
    optimizer.state = optimizer.state
    optimizer.state.clear()  # nothing was used yet
