"""`ServedOptimizer`: the optimizer of a model on the shard servers, and its replacement by another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.steps import Steps
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.types import OptimizerChange, OptimizerSpec


class ServedOptimizer:
    """The optimizer that makes a model's steps on the shard servers.

    Args:
        wrapping: the options with which the model is wrapped.
        steps: makes the worker's half of a step.
        version: returns the number of the model's committed steps.
    """

    def __init__(self, wrapping: Wrapping, steps: Steps, version: Callable[[], int]) -> None:
        self._wrapping = wrapping
        self._steps = steps
        self._version = version
        self._name = ""
        self._change: OptimizerChange | None = None  # with the next step, from version `_change_at`
        self._change_at = 0

    def register(self, spec: OptimizerSpec) -> None:
        """Give the job its optimizer.

        Raises:
            LayoutMismatch: another worker made another optimizer.
        """
        self._steps.register_optimizer(spec)
        self._name = spec.name

    def replace(self, spec: OptimizerSpec, *, retains_moments: bool) -> None:
        """Let another optimizer take its place with the next step.

        Raises:
            Misuse: replicas step asynchronously, and have no common next step.
            InvalidRequest: the model cannot have this optimizer.
            Busy: the shard servers have no memory for its moments.
        """
        if self._wrapping.spec.policy.asynchronous:
            raise Misuse(
                f"{self._wrapping.name!r} has an optimizer already, and under an asynchronous policy there is no step "
                "with which another could take its place; give all groups when you make it, and change their values"
            )
        self._steps.check_optimizer(spec)
        retains = retains_moments and (self._change is None or self._change.retains_moments)
        self._change, self._change_at = OptimizerChange(spec=spec, retains_moments=retains), self._version()

    def retain_moments(self) -> None:
        """Let a pending replacement go on with the present moments."""
        if self._change is not None:
            self._change = replace(self._change, retains_moments=True)

    @property
    def change(self) -> OptimizerChange | None:
        """The change with the next step; None if there is none, or if others have made that step already."""
        return self._change if self._change_at == self._version() else None

    def changed(self, change: OptimizerChange) -> None:
        """Record that a step with this change has committed."""
        self._change, self._name = None, change.spec.name

    def moved(self, steps: int) -> None:
        """Record steps that leave the optimizer as it is: those of `copy_from`."""
        self._change_at += steps

    def check_loaded(self) -> None:
        """Check that the moments in a checkpoint can be loaded.

        Raises:
            Misuse: another type of optimizer is to take its place with the next step.
        """
        change = self.change
        if change is not None and change.spec.name != self._name:
            raise Misuse(
                f"an optimizer of type {change.spec.name!r} is to take the place of the model's, {self._name!r}, "
                "with the next step; load the checkpoint after that step, or before you make another optimizer"
            )

    def restored(self) -> None:
        """Record that the model was restored. A pending change comes with the step after that."""
        self._change_at = self._version()
