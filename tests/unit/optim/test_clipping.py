"""Clipping against torch.nn.utils.clip_grad_norm_. Tests of `optim/clipping.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from axon_ps.compress.cast import sum_of_squares
from axon_ps.errors import InvalidRequest
from axon_ps.optim import clip_factor, global_norm


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1.0, 5.0, 1e6, math.inf])
def test_clipping_is_torchs(max_norm: float) -> None:
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(n, dtype=np.float32) for n in (1, 7, 300)]
    tensors = [torch.nn.Parameter(torch.zeros(g.size)) for g in grads]
    for t, g in zip(tensors, grads, strict=True):
        t.grad = torch.from_numpy(g.copy())
    theirs = float(torch.nn.utils.clip_grad_norm_(tensors, max_norm))
    norm = global_norm(sum_of_squares(g) for g in grads)
    assert norm == pytest.approx(theirs, rel=1e-6)
    factor = clip_factor(norm, max_norm)
    assert 0.0 <= factor <= 1.0
    for t, g in zip(tensors, grads, strict=True):
        assert t.grad is not None
        np.testing.assert_allclose(g * np.float32(factor), t.grad.numpy(), rtol=1e-6)


def test_norm_does_not_depend_on_the_order_of_reports() -> None:
    sums = [1e16, 1.0, 1e-16, 3.0, 1e16]
    assert global_norm(sums) == global_norm(reversed(sums)) == global_norm(sorted(sums))
    assert global_norm([]) == 0.0


def test_non_finite_gradients_show() -> None:
    assert global_norm([1.0, math.inf]) == math.inf
    assert math.isnan(global_norm([1.0, math.nan, math.inf]))
    assert clip_factor(math.inf, 1.0) == 0.0
    assert math.isnan(clip_factor(math.nan, 1.0))


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_impossible_norms_are_refused(max_norm: float) -> None:
    with pytest.raises(InvalidRequest, match="max_norm is"):
        clip_factor(1.0, max_norm)
