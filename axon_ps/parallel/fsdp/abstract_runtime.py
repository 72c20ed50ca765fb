"""`AbstractRuntime`: the steps of a wrapped model, which differ by strategy.

`ServerRuntime` makes them on the shard servers, and `ReplicatedRuntime` on every worker. `runtime` has the order of
events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import torch

from axon_ps.data.elastic import Coordinates
from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.masters import Masters
from axon_ps.parallel.fsdp.steps import Position, StepStatus
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.wrapper import Uncopied
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Hyper, OptimizerChange, OptimizerSpec, StepResult
from axon_ps.worker.checkpoints import CheckpointInfo

LOAD_FAILED: Final = "the checkpoint was not loaded, since that failed"


class AbstractRuntime(Uncopied):
    """The methods of a runtime, beside the order of events."""

    sent: SentGradients
    masters: Masters

    @property
    def now(self) -> Position:
        """(epoch, version) that this worker computes with."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Committed steps, copies from other models included."""
        raise NotImplementedError

    def register_optimizer(self, spec: OptimizerSpec) -> None:
        """Give the model its optimizer."""
        raise NotImplementedError

    def change_optimizer(self, spec: OptimizerSpec, *, retains_moments: bool = False) -> None:
        """Replace the model's optimizer by another one with the next step. Its moments begin anew, or stay."""
        raise NotImplementedError

    def retain_moments(self) -> None:
        """Retain the model's moments for an optimizer that is to replace the model's."""
        raise NotImplementedError

    @property
    def optimizer_change(self) -> OptimizerChange | None:
        """The change of the model's optimizer with the next step; None = there is none."""
        raise NotImplementedError

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of our optimizer on this worker, by parameter and torch's names. It is {} with servers."""
        return {}

    def load_optimizer_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """Set the optimizer's state on this worker, as `optimizer_state` gives it."""
        raise NotImplementedError

    def step(self, hyper: Sequence[Hyper], commit: Mapping[str, str]) -> StepResult:
        """Make a step of the present gradients, and commit these values with it."""
        raise NotImplementedError

    def step_status(self) -> StepStatus:
        """Return this worker's `StepStatus` in the next step, once all members are there."""
        raise NotImplementedError

    @property
    def coordinates(self) -> Coordinates:
        """This worker's coordinates among the members of the next step, as far as it knows."""
        raise NotImplementedError

    @property
    def committed(self) -> Mapping[str, str]:
        """The newest values that were committed with steps, by name."""
        return {}

    def copy_from(self, other: Self, weight: float) -> StepResult:
        """Make a step without gradients: the model becomes (1 - weight) * its values + weight * another's."""
        raise NotImplementedError

    def _push(self, flat: FlatUnit) -> None:
        """Send a unit's complete gradient, to be averaged over the replicas."""
        raise NotImplementedError

    def save(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        states: Mapping[int, FileEntry],
        version: int | None,
    ) -> CheckpointInfo | None:
        """Write a checkpoint on one worker, and return None on the others, which do not wait for it.

        `states` are the files that workers have written, by rank. See `FullyShardedDataParallel.save_checkpoint`.
        """
        raise NotImplementedError

    def load(self, uri: str, optimizer: torch.optim.Optimizer | None) -> CheckpointInfo:
        """See `FullyShardedDataParallel.load_checkpoint`."""
        raise NotImplementedError

    def release(self) -> None:
        """Release what other processes hold of the model."""

    def agree(self) -> None:
        """Agree on a version with the other workers of a replica, before anything is gathered for a forward."""

    def refresh(self) -> None:
        """Update the parameters that stay on this worker, beside units that are resident."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of this step to a global L2 norm, and return the norm before (pending with servers)."""
        return self.sent.clip(max_norm)

    @property
    def shard_numel(self) -> int:
        """Elements of this worker's shards of units (HYBRID_SHARD)."""
        return 0

    @property
    def optimizer_bytes(self) -> int | None:
        """Memory of the state of our optimizer on this worker; None = there is none here."""
        return None
