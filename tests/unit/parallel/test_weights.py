"""A version in PyTorch: tensors of their own, a module that equals the job's, and an engine's workers.

Tests of `parallel/weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.parallel import WeightReceiver, load_weights, update_weights, weight_tensors
from axon_ps.worker.subscription import Weights


def weights_of(module: nn.Module, version: int = 3, dtype: torch.dtype = torch.float32) -> Weights:
    """As a subscription gives them: by first name, read-only, bf16 as uint16."""
    parameters = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.detach().to(dtype)
        parameters[name] = (tensor.view(torch.uint16) if dtype is torch.bfloat16 else tensor).numpy().copy()
        parameters[name].flags.writeable = False
    return Weights(version, parameters)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3, bias=False)
        self.outer.weight = self.inner.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_gets_a_version(dtype: torch.dtype) -> None:
    theirs, ours = nn.Linear(5, 7), nn.Linear(5, 7)
    assert load_weights(ours, weights_of(theirs, 3, dtype)) == 3
    assert torch.equal(ours.weight, theirs.weight.to(dtype).float())
    assert ours.weight.requires_grad


def test_tied_parameters_have_one_name() -> None:
    theirs, ours = Tied(), Tied()
    weights = weights_of(theirs)
    assert list(weights.parameters) == ["inner.weight"]
    load_weights(ours, weights)
    assert torch.equal(ours.outer.weight, theirs.inner.weight)


@pytest.mark.parametrize(
    "take", [lambda given: load_weights(nn.Linear(5, 7), given), lambda given: [*weight_tensors(given)]]
)
def test_half_of_what_a_subscription_gave_is_refused_in_words(take: Callable[[Any], object]) -> None:
    weights = weights_of(nn.Linear(5, 7))
    for half in weights:
        with pytest.raises(InvalidRequest, match="`for weights in subscription`"):
            take(half)


def test_tensors_are_of_their_own() -> None:
    weights = weights_of(nn.Linear(2, 2), dtype=torch.bfloat16)
    tensors = dict(weight_tensors(weights))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    before = weights.parameters["weight"].copy()
    tensors["weight"].zero_()
    np.testing.assert_array_equal(weights.parameters["weight"], before)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(5, 7, bias=False), "has 'bias', which the module has not"),
        (nn.Sequential(nn.Linear(5, 7)), "has no values for '0.weight'"),
        (nn.Linear(5, 8), r"has shape \(8, 5\) here and \(7, 5\)"),
    ],
)
def test_another_module_is_refused_and_left_as_it_was(module: nn.Module, message: str) -> None:
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(InvalidRequest, match=message):
        load_weights(module, weights_of(nn.Linear(5, 7)))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


class FakeSubscription:
    """Versions that go on between two calls."""

    def __init__(self, module: nn.Module, version: int, speed: int) -> None:
        self.module, self.version, self.speed, self.closed = module, version, speed, False

    def latest(self) -> Weights:
        self.version += self.speed
        return weights_of(self.module, self.version)

    def at(self, version: int) -> Weights:
        self.version += self.speed
        if version < self.version:
            raise InvalidRequest(f"version {version} is not there any more")
        self.version = version
        return weights_of(self.module, version)

    def close(self) -> None:
        self.closed = True


class FakeModel(nn.Linear):
    """The signature of a vLLM model's `load_weights`."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        named, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            named[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


class FakeRunner:
    def __init__(self) -> None:
        self.model = FakeModel(3, 2)


class FakeWorker(WeightReceiver):
    """A worker of an engine, into whose class the extension was mixed."""

    def __init__(self) -> None:
        self.model_runner = FakeRunner()


class FakeEngine:
    """The signature of `vllm.LLM.collective_rpc`."""

    def __init__(self, workers: int) -> None:
        self.workers = [FakeWorker() for _ in range(workers)]

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]


def engine_at(monkeypatch: pytest.MonkeyPatch, trained: nn.Module, versions: list[int], speed: int) -> FakeEngine:
    engine, subscriptions = FakeEngine(len(versions)), iter(versions)
    monkeypatch.setattr(axon_ps, "subscribe", lambda **_: FakeSubscription(trained, next(subscriptions), speed))
    engine.collective_rpc("subscribe_weights", kwargs={"model": "policy"})
    return engine


@pytest.mark.parametrize(("versions", "speed"), [([4, 4], 1), ([4, 6, 5], 1), ([1, 90], 3)])
def test_all_workers_of_an_engine_load_the_same_version(
    monkeypatch: pytest.MonkeyPatch, versions: list[int], speed: int
) -> None:
    trained = nn.Linear(3, 2)
    engine = engine_at(monkeypatch, trained, versions, speed)
    version = update_weights(engine.collective_rpc)
    assert version >= max(versions)
    for worker in engine.workers:
        assert torch.equal(worker.model_runner.model.weight, trained.weight)
    engine.collective_rpc("unsubscribe_weights")


def test_an_engine_that_never_agrees_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_at(monkeypatch, nn.Linear(3, 2), [1, 2], 1)
    before = engine.workers[0].model_runner.model.weight.detach().clone()
    with pytest.raises(Timeout, match="not the same one"):
        update_weights(engine.collective_rpc, timeout_s=-1.0)
    assert torch.equal(engine.workers[0].model_runner.model.weight, before)


def test_what_was_not_begun_is_named() -> None:
    worker = FakeWorker()
    with pytest.raises(InvalidRequest, match="call subscribe_weights first"):
        worker.fetch_weights()
    with pytest.raises(InvalidRequest, match="call fetch_weights first"):
        worker.load_fetched_weights()
    assert parallel.WeightReceiver is WeightReceiver
