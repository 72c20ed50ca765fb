"""Lion against algorithm 2 of Chen et al. 2023, written in torch operations. Tests of `optim/lion.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from axon_ps.optim import create
from axon_ps.types import DType


def paper(
    param: torch.Tensor, m: torch.Tensor, g: torch.Tensor, lr: float, beta1: float, beta2: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update: parameters and momentum afterwards."""
    c = beta1 * m + (1 - beta1) * g
    return param - lr * (torch.sign(c) + decay * param), beta2 * m + (1 - beta2) * g


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize(
    "hyper",
    [{}, {"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.01, "beta1": 0.5, "beta2": 0.8}, {"beta1": 0.0, "beta2": 0.0}],
    ids=str,
)
def test_lion_is_the_papers(hyper: dict[str, float], numel: int) -> None:
    lion = create("lion")
    values = lion.validate(hyper)
    rng = np.random.default_rng(numel)
    param, momentum = rng.standard_normal(numel, dtype=np.float32), np.zeros(numel, np.float32)
    p, m = torch.from_numpy(param.copy()), torch.from_numpy(momentum.copy())
    p_peak, m_peak = p.abs(), m.abs()
    for update in range(1, 26):
        grad = rng.standard_normal(numel, dtype=np.float32)
        grad[::5] = 0.0
        lion.apply(param, grad, (momentum,), None, DType.F32, values, update, 0.37)
        g = torch.from_numpy(grad * np.float32(0.37))
        p, m = paper(p, m, g, values["lr"], values["beta1"], values["beta2"], values["weight_decay"])
        p_peak, m_peak = torch.maximum(p_peak, p.abs()), torch.maximum(m_peak, m.abs())
    assert (np.abs(param - p.numpy()) <= 1e-6 * p_peak.numpy()).all()
    assert (np.abs(momentum - m.numpy()) <= 1e-6 * m_peak.numpy()).all()


def test_lion_stands_still_without_a_direction() -> None:
    lion, param, zeros = create("lion"), np.ones(9, np.float32), np.zeros(9, np.float32)
    lion.apply(param, zeros, (zeros.copy(),), None, DType.F32, {"lr": 0.5}, 1, 1.0)
    assert (param == 1.0).all()


def test_lion_keeps_nan() -> None:
    lion, param, grad = create("lion"), np.ones(3, np.float32), np.array([1, np.nan, 1], np.float32)
    lion.apply(param, grad, (np.zeros(3, np.float32),), None, DType.F32, {"lr": 0.5}, 1, 1.0)
    assert np.isnan(param).tolist() == [False, True, False]
