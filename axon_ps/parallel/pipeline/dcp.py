"""The optimizer of a pipeline for torch.distributed.checkpoint: saved from p ranks, loaded on any number.

The parameters need none of this: a `Pipeline` is a module whose state dict has the keys of the full model.

    state = {"model": pipeline, "optimizer": OptimizerState(pipeline, optimizer)}
    dcp.save(state, checkpoint_id=..., process_group=...)
    dcp.load(state, checkpoint_id=..., process_group=...)

Note: [One entry for all copies]
    Each rank that shares a parameter has a copy, under a key of its own. If all copies are on one rank, it has one
    parameter, under its first key. So the state of all copies, which is the same, has the first key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.parallel.pipeline.pipeline import Pipeline


class OptimizerState:
    """A `Stateful` by DCP's protocol: it is given to `dcp.save` and `dcp.load` in a dict, like a module.

    An optimizer that is to be loaded must have its state: take a step with zero gradients first.

    Args:
        pipeline: the pipeline that has the optimizer's parameters.
        optimizer: a torch optimizer of parameters of this rank.

    Raises:
        InvalidRequest: the optimizer has a parameter that the pipeline does not have.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        names = pipeline.parameter_names()
        self._parameters: list[tuple[str, nn.Parameter, dict[str, Any]]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise InvalidRequest(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that the pipeline has not on "
                        "this rank; make it of pipeline.parameters()"
                    )
                self._parameters.append((names[parameter], parameter, group))

    def state_dict(self) -> dict[str, Any]:
        """Return, by parameter keys, the state, the names of its entries and the options of the parameter's group."""
        state: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        for name, parameter, group in self._parameters:
            state.setdefault(name, dict(self._optimizer.state.get(parameter, {})))
            options.setdefault(name, {key: value for key, value in group.items() if key != "params"})
        return {"state": state, "entries": {name: sorted(of) for name, of in state.items()}, "options": options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as `state_dict` returns it. DCP has filled the tensors of first copies in place.

        Raises:
            LayoutMismatch: a parameter had other entries when it was saved than it has here.

        After an error: the state is undefined. Load again, or go on from another checkpoint.
        """
        for name, parameter, group in self._parameters:
            has, given = self._optimizer.state.get(parameter, {}), state_dict["entries"][name]
            if sorted(has) != given:
                raise LayoutMismatch(
                    f"the saved optimizer state of {name!r} is {given}, and this optimizer's is {sorted(has)}: make an "
                    "optimizer of the same kind, and take a step with zero gradients before you load, to make it"
                )
            for key, value in state_dict["state"].get(name, {}).items():
                has[key] = has[key].copy_(value) if isinstance(has[key], torch.Tensor) else value
            group.update(state_dict["options"][name])
