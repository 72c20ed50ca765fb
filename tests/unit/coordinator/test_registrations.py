"""A worker asks whether a later step may replace the optimizer. Tests of `coordinator/core/registrations.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from axon_ps.coordinator.core import models
from axon_ps.errors import AxonError, Busy, InvalidRequest, Misuse
from axon_ps.sharding.job import JobSpec
from axon_ps.types import OptimizerSpec, Role
from axon_ps.wire.events import KnownNames, Registered, ServerMemory
from coordinator_driver import OPTIMIZER, SPEC, Driver, Peer

SGD = OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=OPTIMIZER.group_of)
AMSGRAD = dataclasses.replace(OPTIMIZER, groups=({"lr": 0.1, "amsgrad": 1.0},))


def assembled(*, known: KnownNames | None = None, memory: ServerMemory | None = None) -> tuple[Driver, Peer]:
    """A job with a model whose optimizer is AdamW."""
    d = Driver(world_size=1)
    server = d.peer(Role.SHARD)
    server.known, server.memory = known, memory
    server.join()
    worker = d.worker()
    d.register(worker)
    server.initialized()
    return d, worker


def ask(d: Driver, worker: Peer, optimizer: Any, spec: JobSpec | None = None) -> Any:
    """Ask for another optimizer, with a later step.

    Raises:
        AxonError: it is refused.
    """
    answer = d.call(
        lambda call: d.state.registrations.register(
            call, worker.caller, spec, optimizer, now=d.clock(), name="model 0", later=True
        )
    )
    if isinstance(answer, AxonError):
        raise answer
    return answer


def stored(d: Driver) -> dict[str, bytes]:
    return dict(d.store.load())


def test_a_later_optimizer_is_only_checked() -> None:
    d, worker = assembled()
    before = stored(d)
    answer = ask(d, worker, SGD)
    assert isinstance(answer, Registered)
    assert (answer.first, answer.initialized) == (False, True)
    assert stored(d) == before
    assert not d.register(worker).first, "the model has the optimizer that it had"


def test_a_later_optimizer_that_a_server_does_not_know_is_refused() -> None:
    d, worker = assembled(known=KnownNames(optimizers=frozenset({"adamw"}), compressors=frozenset()))
    with pytest.raises(InvalidRequest, match="does not know optimizer 'sgd' of model 'model 0'"):
        ask(d, worker, SGD)
    assert ask(d, worker, AMSGRAD)


def test_a_later_optimizer_that_servers_have_no_memory_for_is_refused() -> None:
    d, worker = assembled(memory=ServerMemory(available_bytes=1 << 19, resident_bytes=0))
    with pytest.raises(Busy, match="the registration of model 'model 0' is refused, nothing has changed"):
        ask(d, worker, AMSGRAD)
    assert ask(d, worker, SGD)


def test_a_later_optimizer_counts_for_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    d, worker = assembled()
    (model,) = d.state.models
    monkeypatch.setattr(models, "MAX_SPEC_BYTES", model.stored_bytes + 8)
    with pytest.raises(Busy, match="the job's layouts and optimizers would take"):
        ask(d, worker, SGD)


def test_a_later_optimizer_is_of_a_model_that_there_is() -> None:
    d, worker = assembled()
    with pytest.raises(InvalidRequest, match="is to get another optimizer, and none was given"):
        ask(d, worker, None, SPEC)
    d = Driver(world_size=1)
    d.shard()
    with pytest.raises(Misuse, match="registers an optimizer before a layout"):
        ask(d, d.worker(), SGD)
