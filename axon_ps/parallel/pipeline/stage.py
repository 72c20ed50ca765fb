"""`PipelineStage`: one stage's forward and backward of single microbatches.

Owns: the activations of the microbatches that are under way in it. Refuses: to know other stages; the caller brings the
inputs and the gradients of the outputs.

A stage's module takes the output of the stage before it: one tensor, or the tensors of a tuple as separate arguments.
Their shapes may differ from stage to stage and from microbatch to microbatch. Integer outputs and those that do not
require a gradient are sent on, and no gradient comes back for them.

Splitting backward (ZERO_BUBBLE) is PyTorch's: `torch.distributed.pipelining` runs the graph to the inputs first. For
every weight it saves the gradients at the nodes where the weight's path leaves the inputs' paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axon_ps.errors import InvalidRequest

SPLITS_RIGHT = (2, 13)
"""The first torch whose split of backward is right for every graph."""

Tensors = tuple[Tensor, ...]
LossFunction = Callable[..., Tensor]


@dataclass
class _Microbatch:
    """A microbatch that is under way.

    Attributes:
        inputs: leaves of the graph.
        roots: the tensors that backward begins at: the outputs that require a gradient, or the loss.
        grads: gradients of the roots, saved from I to W; None for the loss.
        weights: state that I saves for W; None when W does all of backward.
    """

    inputs: Tensors
    roots: list[Tensor]
    grads: list[Tensor] | None = None
    weights: list[dict[str, Any]] | None = None


class PipelineStage:
    """One stage of the model.

    Args:
        module: the stage's module; its parameters become the pipeline's.
        device: the device that it computes on; None = that of its parameters (without any: the CPU).

    Attributes:
        module: see above, on its device.
        device: see above.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        if device is None:
            self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
            self.module = module
        else:
            self.device = torch.device(device)
            self.module = module.to(self.device)
        self._live: dict[int, _Microbatch] = {}

    @property
    def live(self) -> int:
        """The number of microbatches in memory."""
        return len(self._live)

    def clear(self) -> None:
        """Drop the microbatches under way."""
        self._live.clear()

    @torch.no_grad()
    def infer(self, inputs: Sequence[Tensor]) -> Tensors:
        """Run forward without a graph."""
        return as_tuple(self.module(*(x.to(self.device) for x in inputs)))

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], needs_grad: Sequence[bool], *, split: bool = False
    ) -> Tensors:
        """Run forward with a graph, which stays in memory until backward.

        Args:
            microbatch: its number.
            inputs: the outputs of the stage before, or the microbatch itself.
            needs_grad: True for each of them whose gradient must come back.
            split: backward will be split.

        Returns:
            The outputs, with their graph.
        """
        leaves = tuple(
            x.detach().to(self.device).requires_grad_(needs) for x, needs in zip(inputs, needs_grad, strict=True)
        )
        with torch.enable_grad():
            outputs = as_tuple(self.module(*leaves))
            if split:  # PyTorch's split backward detaches outputs in place, which views refuse
                outputs = tuple(y.clone() if y._is_view() and y.requires_grad else y for y in outputs)
        self._live[microbatch] = _Microbatch(leaves, [y for y in outputs if y.requires_grad])
        return outputs

    def loss(self, microbatch: int, outputs: Tensors, target: Any, function: LossFunction, weight: float) -> Tensor:
        """Return the microbatch's term of the step's loss, from which its backward will begin.

        Args:
            microbatch: its number.
            outputs: the outputs of `forward`.
            target: second argument of the loss function; None = it takes none.
            function: the loss function.
            weight: factor of this microbatch's loss.

        Returns:
            A scalar without graph.

        Raises:
            InvalidRequest: the loss is not a scalar, or does not depend on any parameter.
        """
        output = outputs[0] if len(outputs) == 1 else outputs
        with torch.enable_grad():
            loss = function(output) if target is None else function(output, _to(target, self.device))
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                returned = f"{tuple(loss.shape)} tensor" if isinstance(loss, Tensor) else type(loss).__name__
                raise InvalidRequest(
                    f"the loss function returned a {returned}; needed is a scalar that requires a gradient"
                )
            loss = loss.reshape(()) * weight
        self._live[microbatch].roots = [loss]
        return loss.detach().clone()

    def backward(self, microbatch: int, grads: Sequence[Tensor] | None) -> Tensors:
        """Run all of backward, and drop the microbatch.

        Args:
            microbatch: its number.
            grads: gradients of the outputs that require one, in order; None = the loss's own.

        Returns:
            Gradients of the inputs that need one, in order.
        """
        item = self._live.pop(microbatch)
        self._run(item, self._on_device(grads))
        return _input_grads(item.inputs)

    def backward_input(self, microbatch: int, grads: Sequence[Tensor] | None) -> Tensors:
        """Compute the gradients of the inputs alone, and leave the rest to `backward_weight`."""
        item = self._live[microbatch]
        item.grads = self._on_device(grads)
        if not item.roots or not any(x.requires_grad for x in item.inputs):  # no other stage needs a gradient
            return _input_grads(item.inputs)
        backward_input, _ = split_backward()
        try:
            _, item.weights = backward_input(item.roots, item.grads, list(item.inputs), self._weights())
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):  # PyTorch wraps the stage's own error
                raise error.__cause__ from None
            raise
        item.roots, item.grads = [], None
        return _input_grads(item.inputs)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of the weights after `backward_input`, and drop the microbatch."""
        item = self._live.pop(microbatch)
        if item.weights is None:
            self._run(item, item.grads)
        else:
            _, backward_weight = split_backward()
            backward_weight(self._weights(), item.weights)

    @staticmethod
    def _run(item: _Microbatch, grads: list[Tensor] | None) -> None:
        if item.roots:
            torch.autograd.backward(item.roots, grads)

    def _weights(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _on_device(self, grads: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if grads is None else [g.to(self.device) for g in grads]


class StageModules(nn.Sequential):
    """Modules one after the other. A tuple becomes the next one's arguments, as between stages.

    Children are named by their position in the full model.
    """

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs of the last module."""
        output: Any = inputs
        for module in self:
            output = module(*output) if isinstance(output, tuple) else module(output)
        return output[0] if not len(self) and len(output) == 1 else output


def split_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return PyTorch's backward to the inputs, and that to the weights. Their first import takes a second.

    Raises:
        InvalidRequest: this torch is older than `SPLITS_RIGHT`, and computes wrong gradients for some graphs.
    """
    if torch_version() < SPLITS_RIGHT:
        raise InvalidRequest(
            f"ZERO_BUBBLE splits backward with PyTorch's code, which is wrong for some graphs in torch "
            f"{torch.__version__}; use torch 2.13 or later, or another schedule: INTERLEAVED_ONE_F_ONE_B"
        )
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input, _backward.stage_backward_weight


def torch_version() -> tuple[int, int]:
    """Return the version of the installed torch: (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def as_tuple(output: Any, what: str = "a stage's output") -> Tensors:
    """Return the outputs of a stage, or its inputs, as a tuple.

    Raises:
        InvalidRequest: it is neither a tensor nor a tuple or list of tensors.
    """
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    wrong = {type(y).__name__ for y in outputs if not isinstance(y, Tensor)}
    if wrong or not outputs:
        raise InvalidRequest(f"{what} is of {sorted(wrong) or 'nothing'}; needed is a tensor or a tuple of tensors")
    return outputs


def _input_grads(inputs: Tensors) -> Tensors:
    """Return the gradients of inputs that need one, with zeros for unused inputs."""
    grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad)
    for x in inputs:
        x.grad = None
    return grads


def _to(target: Any, device: torch.device) -> Any:
    if isinstance(target, Tensor):
        return target.to(device)
    return tuple(_to(t, device) for t in target)
