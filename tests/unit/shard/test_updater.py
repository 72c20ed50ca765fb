"""A model has one optimizer, which only a step replaces. Tests of `shard/core/updater.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from axon_ps.errors import InternalError, InvalidRequest, Misuse, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.master import Master
from axon_ps.shard.core.updater import Updater
from axon_ps.types import Array, Hyper, OptimizerChange, OptimizerSpec
from engine_driver import Servers, apply, commit_of, job_of, layout_of, one_group

NUMEL = 100
LAYOUT = layout_of([NUMEL - 30, 30])
SPEC = job_of(LAYOUT)
ADAM, SGD = one_group(LAYOUT, "adamw", lr=0.1), one_group(LAYOUT, lr=0.5)
MOMENTUM: Hyper = {"lr": 0.5, "momentum": 0.9}


def servers(optimizer: OptimizerSpec = ADAM, values: Array | None = None) -> Servers:
    made = Servers(SPEC, optimizer=optimizer)
    made.upload([np.ones(NUMEL, np.float32) if values is None else values])
    return made


def gradient(step: int) -> Array:
    return np.random.default_rng(step).standard_normal(NUMEL).astype(np.float32)


def train(made: Servers, steps: Sequence[int], change: OptimizerChange | None = None, *hyper: Hyper) -> Master:
    """Make steps, of which the first one replaces the optimizer."""
    engine = made.engines[0]
    for step in steps:
        made.push(0, 0, gradient(step))
        apply(engine, replace(commit_of(engine, hyper), optimizer=change))
        change = None
    return engine.slices[0].master


def same(one: Master, other: Master) -> bool:
    return (
        one.values.tobytes() == other.values.tobytes()
        and {name: array.tobytes() for name, array in one.state.items()}
        == {name: array.tobytes() for name, array in other.state.items()}
        and one.parameter_updates() == other.parameter_updates()
    )


def test_another_optimizer_begins_anew_with_the_step_that_names_it() -> None:
    made = servers()
    before = train(made, [1, 2]).values.copy()
    master = train(made, [3], OptimizerChange(spec=SGD))
    np.testing.assert_allclose(master.values, before - 0.5 * gradient(3), rtol=1e-6)
    assert (master.state, master.parameter_updates()) == ({}, (1, 1))
    updater = made.engines[0].optimizer.updater
    assert updater is not None
    assert updater.spec == SGD


@pytest.mark.parametrize("retains", [False, True])
def test_moments_of_the_same_optimizer_are_retained_on_request(retains: bool) -> None:
    change = OptimizerChange(spec=one_group(LAYOUT, "adamw", lr=0.3), retains_moments=retains)
    made = servers()
    before = train(made, [1, 2]).values.copy()
    replaced = train(made, [3, 4], change)
    other = servers() if retains else servers(change.spec, before)
    if retains:
        train(other, [1, 2])
    assert same(replaced, train(other, [3, 4], None, {"lr": 0.3}))


def test_moments_of_another_optimizer_are_never_retained() -> None:
    made = servers(one_group(LAYOUT, **MOMENTUM))
    assert set(train(made, [1]).state) == {"momentum_buffer"}
    master = train(made, [2], OptimizerChange(spec=ADAM, retains_moments=True))
    assert (set(master.state), master.parameter_updates()) == ({"exp_avg", "exp_avg_sq"}, (1, 1))


def test_a_moment_is_made_when_a_step_first_needs_it_and_cannot_be_expected_before() -> None:
    made = servers(SGD)
    updater = made.engines[0].optimizer.updater
    assert updater is not None
    assert updater.expected(({"lr": 0.25},)).hypers[0]["lr"] == 0.25
    with pytest.raises(StepAborted, match="need new moments"):
        updater.expected((MOMENTUM,))
    assert not train(made, [1]).state
    assert set(train(made, [2], None, MOMENTUM).state) == {"momentum_buffer"}
    assert updater.expected((MOMENTUM,)).hypers[0]["momentum"] == 0.9
    assert set(train(made, [3], None, {"lr": 0.5}).state) == {"momentum_buffer"}, "it may be turned on again"


def test_hyperparameters_stay_until_a_step_names_others() -> None:
    made = servers(SGD)
    values = train(made, [1], None, {"lr": 0.25}).values.copy()
    after = train(made, [2]).values
    np.testing.assert_allclose(after, values - 0.25 * gradient(2), rtol=1e-6)


def test_hyperparameters_are_one_set_a_group() -> None:
    updater = Updater(SGD, 2)
    with pytest.raises(InternalError, match="a step has hyperparameters of 2 groups; there are 1"):
        updater.update(({}, {}), 1.0, ())
    with pytest.raises(InvalidRequest, match="hyperparameters of 2 groups were given; there are 1"):
        updater.expected(({}, {}))
    with pytest.raises(InvalidRequest, match="names the groups of 2 parameters; the layout has 3"):
        Updater(SGD, 3)


def test_a_model_has_one_optimizer() -> None:
    engine = servers(SGD).engines[0]
    assert engine.optimizer.set(SGD) is engine.optimizer.updater
    with pytest.raises(Misuse, match="this server runs sgd already"):
        engine.optimizer.set(ADAM)
    with pytest.raises(Misuse, match="the optimizer came before the layout"):
        ShardEngine().optimizer.set(SGD)
