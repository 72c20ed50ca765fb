"""A job's newest parameters, outside of the job: pulled, loaded into a module, exported."""

from __future__ import annotations

import sys
import tempfile
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import axon_ps
from axon_ps import Subscription, Weights
from axon_ps.parallel import FSDP, SGD, load_weights, weight_tensors


def follow(subscription: Subscription, module: nn.Module) -> list[int]:
    """Follow the job for two versions; return them."""
    versions: list[int] = []
    for weights in subscription:
        load_weights(module, assert_type(weights, Weights))
        versions.append(assert_type(weights.version, int))
        if len(versions) == 2:
            break
    version, parameters = subscription.latest()
    first = assert_type(parameters["weight"], npt.NDArray[Any])
    print(version, first.astype(np.float32).mean())
    for named in weight_tensors(subscription.latest(), device="cpu"):
        assert_type(named, tuple[str, torch.Tensor])
    subscription.export(tempfile.mkdtemp())
    return versions


def main(world: axon_ps.World) -> int:
    """Make a step for those who follow; return the version."""
    model = FSDP(nn.Linear(4, 2), world)
    optimizer = SGD(model, lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model.version


if __name__ == "__main__":
    if sys.argv[1:] == ["follow"]:
        with axon_ps.subscribe(every="1s", timeout_s=60, dtype="float32") as joined:
            print(follow(joined, nn.Linear(4, 2)))
    else:
        with axon_ps.World.init() as joined_world:
            print(main(joined_world))
