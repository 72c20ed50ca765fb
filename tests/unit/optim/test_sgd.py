"""SGD against torch.optim.SGD. Tests of `optim/sgd.py`."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.optim import create

SETTINGS: list[dict[str, float]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.01},
    {"lr": 0.1, "maximize": 1.0},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "dampening": -0.5, "maximize": 1.0},
    {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0},
    {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.01, "maximize": 1.0},
    {"lr": 0.0, "momentum": 0.5},
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
def test_sgd_is_torchs(oracle: Any, hyper: dict[str, float], fused: bool) -> None:
    oracle.check("sgd", hyper, grad_scale=0.37, fused=fused)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_sgd_sizes(oracle: Any, numel: int) -> None:
    oracle.check("sgd", {"lr": 0.1, "momentum": 0.9}, numel)


def test_sgd_state() -> None:
    sgd = create("sgd")
    assert sgd.state_names([{"lr": 1.0}]) == ()
    assert sgd.state_names([{"momentum": 0.0}, {"momentum": 0.9}]) == ("momentum_buffer",)


def test_sgd_group_without_momentum_leaves_the_buffer_alone(oracle: Any) -> None:
    plain, heavy = {"lr": 0.1, "momentum": 0.0}, {"lr": 0.1, "momentum": 0.9}
    ours = oracle.ours("sgd", [plain, heavy], 100, 20, group=0)
    assert not ours.state.pop("momentum_buffer").any()
    oracle.assert_close(ours, oracle.torch("sgd", plain, 100, 20))


@pytest.mark.parametrize("hyper", [{"nesterov": 1.0}, {"nesterov": 1.0, "momentum": 0.9, "dampening": 0.1}], ids=str)
def test_sgd_nesterov_needs_undampened_momentum(hyper: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="nesterov"):
        create("sgd").validate(hyper)
