"""The optimizer of a model on the servers, and another that takes its place with the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.on_servers.served_optimizer import ServedOptimizer
from axon_ps.sharding.policy import Asynchronous, Policy, Synchronous
from axon_ps.types import OptimizerSpec

SGD = OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=(0,))
ADAM = OptimizerSpec(name="adam", groups=({"lr": 0.1},), group_of=(0,))


class Job:
    """Notes the optimizers that it is given and asked for."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.version = 0
        self.registered: list[str] = []
        self.checked: list[str] = []
        wrapping: Any = SimpleNamespace(name="m", spec=SimpleNamespace(policy=policy or Synchronous()))
        steps: Any = self
        self.optimizer = ServedOptimizer(wrapping, steps, lambda: self.version)
        self.optimizer.register(SGD)

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        self.registered.append(spec.name)

    def check_optimizer(self, spec: OptimizerSpec) -> None:
        self.checked.append(spec.name)


def test_another_takes_its_place_with_the_next_step() -> None:
    job = Job()
    assert job.registered == ["sgd"]
    job.optimizer.replace(ADAM, retains_moments=False)
    assert job.checked == ["adam"]
    change = job.optimizer.change
    assert change is not None
    assert (change.spec, change.retains_moments) == (ADAM, False)
    job.version = 1
    job.optimizer.changed(change)
    assert job.optimizer.change is None
    job.optimizer.replace(ADAM, retains_moments=False)
    job.optimizer.check_loaded()  # it is of the same type now


def test_nothing_takes_its_place_by_itself() -> None:
    assert Job().optimizer.change is None


def test_the_step_that_others_made_alone_has_not_changed_it() -> None:
    job = Job()
    job.optimizer.replace(ADAM, retains_moments=False)
    job.version = 1
    assert job.optimizer.change is None


def test_copies_and_restores_are_no_steps_of_it() -> None:
    job = Job()
    job.optimizer.replace(ADAM, retains_moments=False)
    job.version = 1
    job.optimizer.moved(1)
    assert job.optimizer.change is not None
    job.version = 7
    job.optimizer.restored()
    assert job.optimizer.change is not None


def test_moments_are_retained_if_every_change_retains_them() -> None:
    job = Job()
    job.optimizer.replace(SGD, retains_moments=False)
    job.optimizer.replace(SGD, retains_moments=True)
    assert job.optimizer.change is not None
    assert not job.optimizer.change.retains_moments
    job.optimizer.retain_moments()
    assert job.optimizer.change.retains_moments


def test_moments_of_another_type_are_not_loaded_before_the_change() -> None:
    job = Job()
    job.optimizer.check_loaded()
    job.optimizer.replace(ADAM, retains_moments=False)
    with pytest.raises(Misuse, match="'adam' is to take the place of the model's, 'sgd'"):
        job.optimizer.check_loaded()


def test_under_an_asynchronous_policy_there_is_no_next_step() -> None:
    job = Job(Asynchronous())
    with pytest.raises(Misuse, match="there is no step with which another could take its place"):
        job.optimizer.replace(ADAM, retains_moments=False)
