"""Adagrad against torch.optim.Adagrad. Tests of `optim/adagrad.py`."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.optim import create

SETTINGS: list[dict[str, float]] = [
    {},
    {"lr": 0.1, "lr_decay": 0.1},
    {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6},
    {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": 1.0},
    {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 2.0, "maximize": 1.0},
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
def test_adagrad_is_torchs(oracle: Any, hyper: dict[str, float], fused: bool) -> None:
    oracle.check("adagrad", hyper, grad_scale=0.37, fused=fused)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_adagrad_sizes(oracle: Any, numel: int) -> None:
    oracle.check("adagrad", {"lr": 0.1}, numel)


def test_adagrad_state() -> None:
    adagrad = create("adagrad")
    assert adagrad.state_names([{}]) == ("sum",)
    assert adagrad.initial_state("sum", [{}]) == 0.0
    assert adagrad.initial_state("sum", []) == 0.0
    assert adagrad.initial_state("sum", [{"initial_accumulator_value": 0.5, "lr": v} for v in (1.0, 2.0)]) == 0.5


def test_adagrad_refuses_two_initial_accumulators() -> None:
    with pytest.raises(InvalidRequest, match=r"0, 0\.5"):
        create("adagrad").initial_state("sum", [{"initial_accumulator_value": 0.5}, {}])
