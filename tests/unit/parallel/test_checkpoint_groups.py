"""The optimizer's groups in a checkpoint's `extra`: they come back into an optimizer, and the caller sees none of it.

Tests of `parallel/checkpoints/groups.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from axon_ps.errors import CheckpointCorrupt
from axon_ps.parallel.checkpoints.groups import of_caller, set_groups, with_groups
from axon_ps.worker.checkpoints import CheckpointInfo


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, groups: int = 2, **options: Any) -> Any:
    made: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)]
    return kind(made, **{"lr": 0.1, **options})  # type: ignore[call-arg]


def saved(extra: dict[str, Any], **fields: Any) -> CheckpointInfo:
    """The info of a checkpoint with this `extra`, which goes through JSON."""
    return CheckpointInfo(uri="file:/c", version=3, bytes=0, extra=json.loads(json.dumps(extra)), **fields)


def test_all_keys_of_groups_come_back() -> None:
    before = optimizer(betas=(0.8, 0.9))
    before.param_groups[1].update(lr=0.7, initial_lr=2.0, note="warm")
    after = optimizer()
    parameters = [list(group["params"]) for group in after.param_groups]
    set_groups(after, saved(with_groups({"epoch": 4}, before)))
    for old, new in zip(before.param_groups, after.param_groups, strict=True):
        without = {key: value for key, value in old.items() if key != "params"}
        assert {key: value for key, value in new.items() if key != "params"} == without
    assert [group["params"] for group in after.param_groups] == parameters


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    before, after = optimizer(lr=0.25), optimizer(lr=torch.tensor(1.0, dtype=torch.float64))
    set_groups(after, saved(with_groups(None, before)))
    rate = after.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.dtype is torch.float64
    assert rate.item() == 0.25


def test_the_caller_sees_its_own_part_alone() -> None:
    given = {"epoch": 4, "name": "run"}
    extra = with_groups(given, optimizer())
    assert extra.keys() > given.keys()
    assert of_caller(saved(extra)).extra == given
    assert given.keys() == {"epoch", "name"}
    assert with_groups(given, None) == given
    assert with_groups(None, None) == {}


@pytest.mark.parametrize("damaged", [5, "text", [1, 2], {"lr": 0.1}])
def test_damaged_groups_are_an_error_that_names_the_checkpoint(damaged: Any) -> None:
    (key,) = with_groups(None, optimizer())
    with pytest.raises(CheckpointCorrupt, match="the parameter groups in file:/c are damaged"):
        set_groups(optimizer(), saved({key: damaged}))


def test_without_groups_the_hyperparameters_of_its_newest_step_count() -> None:
    hyper = [{"lr": rate, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.125} for rate in (0.01, 0.02)]
    after = optimizer()
    set_groups(after, saved({}, optimizer="adamw", hyper=hyper))
    for group, rate in zip(after.param_groups, (0.01, 0.02), strict=True):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (rate, (0.5, 0.75), 0.125)


@pytest.mark.parametrize(
    "info",
    [
        saved({}, optimizer="sgd", hyper=[{"lr": 0.5}, {"lr": 0.5}]),  # of another optimizer
        saved({}, optimizer="adamw", hyper=[{"lr": 0.5}]),
        saved(with_groups(None, optimizer(groups=3, lr=0.5))),
    ],
)
def test_another_number_of_groups_is_told_and_changes_nothing(info: CheckpointInfo) -> None:
    after = optimizer()
    with pytest.warns(UserWarning, match="the checkpoint file:/c has values of [013] parameter groups.*which has 2"):
        set_groups(after, info)
    assert [group["lr"] for group in after.param_groups] == [0.1, 0.1]
