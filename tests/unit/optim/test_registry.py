"""Optimizers by name, their defaults and what they refuse."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from axon_ps.errors import InvalidRequest
from axon_ps.optim import SGD, create, names, register

TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", names())
def test_create_and_defaults_are_complete(name: str) -> None:
    optimizer = create(name)
    assert optimizer.name == name
    assert optimizer.validate({}) == dict(optimizer.defaults)
    assert set(optimizer.ranges) == set(optimizer.defaults)


@pytest.mark.parametrize("name", list(TORCH))
def test_defaults_are_torchs(name: str) -> None:
    theirs = {p.name: p.default for p in inspect.signature(TORCH[name]).parameters.values()}
    if "betas" in theirs:
        theirs["beta1"], theirs["beta2"] = theirs["betas"]
    ours = create(name).defaults
    assert {n: theirs[n] for n in ours} == ours
    left_out = {"params", "betas", "foreach", "fused", "differentiable", "capturable", "decoupled_weight_decay"}
    assert theirs.keys() - ours.keys() <= left_out


def test_unknown_optimizer() -> None:
    with pytest.raises(
        InvalidRequest, match="'adamx' is unknown; use one of adagrad, adam, adamw, lion, rmsprop, sgd, or load"
    ):
        create("adamx")


def test_unknown_hyperparameter() -> None:
    with pytest.raises(InvalidRequest, match="adamw has no hyperparameter 'betas'; it has lr, beta1"):
        create("adamw").validate({"betas": 0.9})


@pytest.mark.parametrize(
    ("name", "hyper", "words"),
    [
        ("adamw", {"lr": -1.0}, "lr is -1.0; needed is a finite value ≥ 0"),
        ("adamw", {"lr": math.nan}, "lr is nan"),
        ("adamw", {"lr": math.inf}, "lr is inf"),
        ("adamw", {"lr": 1e39}, "lr is 1e"),
        ("adamw", {"beta1": 1.0}, r"beta1 is 1.0; needed is a value in \[0, 1\)"),
        ("adamw", {"beta2": -0.1}, "beta2"),
        ("adamw", {"eps": -1e-8}, "eps"),
        ("adamw", {"amsgrad": 0.5}, "amsgrad is 0.5; needed is 0 or 1"),
        ("sgd", {"momentum": -0.1}, "momentum"),
        ("sgd", {"dampening": math.inf}, "dampening is inf; needed is any finite value"),
        ("adagrad", {"lr_decay": -1.0}, "lr_decay"),
        ("adagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
        ("rmsprop", {"alpha": -1.0}, "alpha"),
        ("lion", {"beta2": 1.0}, "beta2"),
        ("lion", {"lr": "fast"}, "lr is 'fast'"),
    ],
)
def test_values_out_of_range(name: str, hyper: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        create(name).validate(hyper)


def test_numbers_of_any_kind_are_floats_afterwards() -> None:
    values = create("sgd").validate({"lr": 1, "momentum": np.float32(0.5), "nesterov": True})
    assert values["lr"] == 1.0
    assert all(type(v) is float for v in values.values())


def test_unknown_state() -> None:
    with pytest.raises(InvalidRequest, match="no state 'momentum_buffer' with these groups; it has none"):
        create("sgd").initial_state("momentum_buffer", [{}])


def test_a_users_optimizer_is_known_by_its_name() -> None:
    @register("sgd_of_a_user")
    class Mine(SGD):
        pass

    mine = create("sgd_of_a_user")
    assert type(mine) is Mine
    assert (mine.name, SGD.name) == ("sgd_of_a_user", "sgd")
    with pytest.raises(InvalidRequest, match="sgd_of_a_user has no hyperparameter 'rate'"):
        mine.validate({"rate": 1.0})
