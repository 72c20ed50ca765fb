"""Adam and AdamW against torch.optim. Tests of `optim/adam.py`."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.optim import create

SETTINGS: list[dict[str, float]] = [
    {},
    {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
    {"lr": 0.1, "beta1": 0.0, "beta2": 0.0},
    {"lr": 0.1, "beta1": 0.3, "beta2": 0.99},
    {"weight_decay": 0.0},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": 1.0},
    {"lr": 0.1, "amsgrad": 1.0},
    {"lr": 0.1, "amsgrad": 1.0, "weight_decay": 0.1, "maximize": 1.0},
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
def test_adam_is_torchs(oracle: Any, name: str, hyper: dict[str, float], fused: bool) -> None:
    oracle.check(name, hyper, grad_scale=0.37, fused=fused)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_adam_sizes(oracle: Any, name: str, numel: int) -> None:
    oracle.check(name, {"lr": 0.1}, numel)


def test_adamw_million(oracle: Any) -> None:
    """One size that no vector width and no page divides."""
    oracle.check("adamw", {"lr": 0.1}, 1000003, 2, fused=True)


def test_adam_many_updates(oracle: Any) -> None:
    """The bias corrections tend to 1."""
    oracle.check("adamw", {"lr": 0.01}, 33, 100)


def test_adam_state() -> None:
    adam = create("adam")
    assert adam.state_names([{}]) == ("exp_avg", "exp_avg_sq")
    assert adam.state_names([{}, {"amsgrad": 1.0}]) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert adam.initial_state("exp_avg", [{}]) == 0.0


def test_adam_group_without_amsgrad_leaves_the_maximum_alone(oracle: Any) -> None:
    ours = oracle.ours("adam", [{}, {"amsgrad": 1.0}], 100, 20, group=0)
    assert not ours.state.pop("max_exp_avg_sq").any()
    oracle.assert_close(ours, oracle.torch("adam", {}, 100, 20))
