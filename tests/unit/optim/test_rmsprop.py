"""RMSprop against torch.optim.RMSprop. Tests of `optim/rmsprop.py`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from axon_ps.optim import create

SETTINGS: list[dict[str, float]] = [
    {},
    {"lr": 0.1, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "alpha": 0.4, "centered": 1.0},
    {"lr": 0.1, "centered": 1.0, "momentum": 0.5, "weight_decay": 0.1, "maximize": 1.0},
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
def test_rmsprop_is_torchs(oracle: Any, hyper: dict[str, float], foreach: bool) -> None:
    oracle.check("rmsprop", hyper, grad_scale=0.37, foreach=foreach)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_rmsprop_sizes(oracle: Any, numel: int) -> None:
    oracle.check("rmsprop", {"lr": 0.1, "momentum": 0.9, "centered": 1.0}, numel, 10)


def test_rmsprop_state() -> None:
    rmsprop = create("rmsprop")
    assert rmsprop.state_names([{}]) == ("square_avg",)
    assert rmsprop.state_names([{"momentum": 0.9}]) == ("square_avg", "momentum_buffer")
    assert rmsprop.state_names([{"centered": 1.0}]) == ("square_avg", "grad_avg")
    both = rmsprop.state_names([{"centered": 1.0}, {"momentum": 0.9}])
    assert both == ("square_avg", "momentum_buffer", "grad_avg")


@pytest.mark.parametrize("mine", range(4))
def test_rmsprop_groups_of_all_kinds_side_by_side(oracle: Any, mine: int) -> None:
    """Each group finds its own arrays among those of the union, and leaves the others alone."""
    groups = [{"momentum": m, "centered": c} for m, c in itertools.product((0.0, 0.9), (0.0, 1.0))]
    for others in (groups, [groups[mine]]):
        ours = oracle.ours("rmsprop", others, 100, 20, group=others.index(groups[mine]))
        theirs = oracle.torch("rmsprop", groups[mine], 100, 20)
        oracle.assert_close(ours, theirs)
        assert not any(ours.state[n].any() for n in ours.state.keys() - theirs.state.keys())
