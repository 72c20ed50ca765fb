"""The position in a fit, in the form of Lightning's loops. It needs nothing of Lightning, which need not be installed.

Tests of `lightning/position.py`.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import axon_ps


@pytest.fixture(scope="module")
def position() -> ModuleType:
    """The module, without its package, which imports Lightning."""
    spec = importlib.util.spec_from_file_location(
        "position", Path(axon_ps.__file__).parent / "lightning" / "position.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def progress(ready: int, completed: int, **others: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, **others}


def in_a_step(batch: int, epoch: int, *, of: int = 10, manual: bool = False) -> dict[str, Any]:
    """`trainer.fit_loop.state_dict()` of Lightning 2 inside `optimizer.step()`; one step a batch, `of` an epoch."""
    total = epoch * of + batch
    begun, idle = (total, total - 1), (0, 0)
    automatic, by_hand = (idle, begun) if manual else (begun, idle)
    current = (batch, batch - 1)
    return {
        "state_dict": {"a": [1]},
        "epoch_progress": {
            "total": progress(epoch + 1, epoch, started=epoch + 1, processed=epoch),
            "current": progress(epoch + 1, epoch, started=epoch + 1, processed=epoch),
        },
        "epoch_loop.state_dict": {"_batches_that_stepped": total - 1},
        "epoch_loop.batch_progress": {
            "total": progress(total, total - 1, started=total, processed=total - 1),
            "current": progress(batch, batch - 1, started=batch, processed=batch - 1),
            "is_last_batch": batch == of,
        },
        "epoch_loop.scheduler_progress": {"total": progress(*idle), "current": progress(*idle)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {
                    "total": progress(*automatic),
                    "current": progress(*(idle if manual else current)),
                },
                "zero_grad": {
                    "total": progress(*automatic, started=automatic[0]),
                    "current": progress(*(idle if manual else current), started=0 if manual else batch),
                },
            },
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {
            "total": progress(*by_hand),
            "current": progress(*(current if manual else idle)),
        },
        "epoch_loop.val_loop.state_dict": {"unused": True},
    }


def test_after_a_step_its_batch_is_processed_and_not_completed(position: ModuleType) -> None:
    made = position.after_step(in_a_step(4, 2))["epoch_loop.batch_progress"]
    assert made["total"] == progress(24, 23, started=24, processed=24)
    assert made["current"] == progress(4, 3, started=4, processed=4)


@pytest.mark.parametrize("manual", [True, False])
def test_after_a_step_it_is_completed(position: ModuleType, *, manual: bool) -> None:
    made = position.after_step(in_a_step(4, 2, manual=manual))
    automatic = made["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    by_hand = made["epoch_loop.manual_optimization.optim_step_progress"]
    (did, idle) = (by_hand, automatic["step"]) if manual else (automatic["step"], by_hand)
    assert did == {"total": progress(24, 24), "current": progress(4, 4)}
    assert idle == {"total": progress(0, 0), "current": progress(0, 0)}
    if not manual:
        assert automatic["zero_grad"]["total"] == progress(24, 24, started=24)
    assert position.steps_made(made) == 24


def test_the_loops_themselves_are_not_changed_and_other_loops_are_left_out(position: ModuleType) -> None:
    loops = in_a_step(4, 2)
    before = copy.deepcopy(loops)
    made = position.after_step(loops)
    made["state_dict"]["a"].append(2)
    assert loops == before
    assert made.keys() < before.keys()
    assert "epoch_loop.val_loop.state_dict" not in made
    assert made["epoch_progress"] == before["epoch_progress"]


@pytest.mark.parametrize(("batch", "used"), [(1, 1), (9, 9), (10, 0)])  # with the tenth the epoch is over
def test_batches_of_the_epoch_under_way_that_were_used(position: ModuleType, batch: int, used: int) -> None:
    made = position.after_step(in_a_step(batch, 3))
    assert position.batches_used(made) == used
    assert position.epochs_made(made) == 3
    assert position.steps_made(made) == 30 + batch
