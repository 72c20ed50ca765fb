"""Weights that a subscription pulls, in PyTorch: as tensors, into a module, and into an inference engine.

Note: [Engines that load weights]
    vLLM's models have `load_weights(weights)`, which takes pairs of a Hugging Face name and a tensor and converts them
    to the engine's layout. Its workers take a mix-in class (`worker_extension_cls`), whose methods `collective_rpc`
    calls on each. `WeightReceiver` is such a class. It is written against that interface, and is not tested with vLLM.

Note: [Ranks of an engine]
    An engine may be split over several workers. Each of them pulls the weights, and loads its own part. All have to
    load the same version while the job goes on. So a version is fetched first, and loaded when all have the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

import axon_ps
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.parallel.precision import DTYPES
from axon_ps.types import Array
from axon_ps.worker.subscription import Subscription, Weights

RPC = Callable[..., Sequence[Any]]
"""An engine's `collective_rpc`: calls a method by name on every worker with `args` and `kwargs`; returns results."""

_PAST = -1
_FURTHER = 2


def weight_tensors(weights: Weights, device: torch.device | str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter's name with a tensor of its own, one after the other.

    Args:
        weights: one version, from a subscription.
        device: the device of the tensors; None = the CPU.

    Raises:
        InvalidRequest: `weights` is not from a subscription.
    """
    for name, array in _checked(weights).parameters.items():
        yield name, _tensor(array).to(device)


def load_weights(module: nn.Module, weights: Weights) -> int:
    """Copy a version into a module's parameters, cast to their dtype, on their device; return the version.

    The module is built like that of the workers. Tied parameters may have either name there. The buffers stay.

    Raises:
        InvalidRequest: `weights` is not from a subscription; or a parameter is missing on either side, or has another
            shape. Nothing was copied.
    """
    theirs = dict(_checked(weights).parameters)
    named = dict(module.named_parameters(remove_duplicate=False))
    found = {name: parameter for name, parameter in named.items() if name in theirs}
    there = {id(parameter) for parameter in found.values()}
    missing = [name for name, parameter in named.items() if id(parameter) not in there]
    unknown = [name for name in theirs if name not in named]
    if missing or unknown:
        what = f"has no values for {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the module has not"
        raise InvalidRequest(f"version {weights.version} {what}; build the module as the job's workers do")
    for name, parameter in found.items():
        if tuple(parameter.shape) != theirs[name].shape:
            raise InvalidRequest(
                f"parameter {name!r} has shape {tuple(parameter.shape)} here and {theirs[name].shape} in the job"
            )
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(_tensor(theirs[name], parameter.dtype))
    return weights.version


def _checked(weights: Weights) -> Weights:
    """Return one version of a subscription, and refuse its parameters alone (`for version, parameters in ...`)."""
    if not isinstance(weights, Weights):
        raise InvalidRequest(
            f"weights is of type {type(weights).__name__}; give what the subscription gave, as in `for weights in "
            "subscription`, or axon_ps.Weights(version, parameters)"
        )
    return weights


def _tensor(array: Array, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a copy as a tensor: pulled arrays must not change, and tensors can.

    It is of `dtype` if numpy stores that dtype as the array's. Other arrays of uint16 are bf16.
    """
    copy = array.copy()
    if (known := DTYPES.get(dtype)) is not None and known.numpy == copy.dtype:
        return torch.from_numpy(copy.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
    tensor = torch.from_numpy(copy)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor


class _HasLoadWeights(Protocol):
    def load_weights(self, weights: Any) -> Any: ...


class _ModelRunner(Protocol):
    model: _HasLoadWeights


class WeightReceiver:
    """Methods for the workers of an inference engine: vLLM's `worker_extension_cls`. See `update_weights`.

        engine = vllm.LLM(..., worker_extension_cls="axon_ps.parallel.weights.WeightReceiver")
        engine.collective_rpc("subscribe_weights", kwargs={"model": "policy", "dtype": "bf16"})
        version = axon_ps.parallel.update_weights(engine.collective_rpc)

    The worker has `model_runner.model.load_weights`, which takes Hugging Face names.
    """

    model_runner: _ModelRunner
    _subscription: Subscription | None = None
    _fetched: Weights | None = None

    def subscribe_weights(self, **options: Any) -> None:
        """Subscribe with the options of `axon_ps.subscribe`."""
        self.unsubscribe_weights()
        self._subscription = axon_ps.subscribe(**options)

    def fetch_weights(self, version: int | None = None) -> int:
        """Pull the newest version, or exactly `version`, without loading it.

        Returns:
            The version pulled, or -1 if the model is past it.

        Raises:
            InvalidRequest: there is no subscription.
        """
        if self._subscription is None:
            raise InvalidRequest("there is no subscription; call subscribe_weights first")
        try:
            self._fetched = self._subscription.latest() if version is None else self._subscription.at(version)
        except InvalidRequest:
            return _PAST
        return self._fetched.version

    def load_fetched_weights(self) -> int:
        """Load the fetched version into the engine's model, and return it.

        Raises:
            InvalidRequest: no version was fetched.
        """
        if self._fetched is None:
            raise InvalidRequest("no version was fetched; call fetch_weights first")
        fetched, self._fetched = self._fetched, None
        self.model_runner.model.load_weights(weights=weight_tensors(fetched))
        return fetched.version

    def unsubscribe_weights(self) -> None:
        """End the subscription. Repeated calls do nothing."""
        if self._subscription is not None:
            self._subscription.close()
        self._subscription = self._fetched = None


def update_weights(rpc: RPC, timeout_s: float = 600.0) -> int:
    """Have all workers of an engine load the same version, their newest or a later one, and return it.

    Args:
        rpc: the engine's `collective_rpc`. Its workers are `WeightReceiver`s that have subscribed.
        timeout_s: most seconds until all have the same version.

    Raises:
        Timeout: they do not have the same version in time. The engine still has its earlier weights.
        AxonError: a pull raised it, and the engine raises it again.
    """
    deadline_s = time.monotonic() + timeout_s
    versions, margin = rpc("fetch_weights"), 1
    while len(set(versions)) > 1 or _PAST in versions:
        if time.monotonic() > deadline_s:
            raise Timeout(
                f"the engine's workers got versions {list(versions)} within {timeout_s:g} s, not the same one"
            )
        versions, margin = rpc("fetch_weights", args=(max(versions) + margin,)), margin * _FURTHER
    rpc("load_fetched_weights")
    return int(versions[0])
