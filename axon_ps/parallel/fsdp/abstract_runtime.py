"""`AbstractRuntime`: how the steps of a wrapped model are made, which differs by strategy.

`ServerRuntime` makes them on the shard servers, `ReplicatedRuntime` on every worker. What happens when is `runtime`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import torch

from axon_ps import errors
from axon_ps.data.elastic import Place
from axon_ps.errors import AxonError, Disagreement, InvalidRequest
from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.steps import Position, Standing
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.wrapper import Uncopied
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.types import Hyper, OptimizerSpec, StepResult
from axon_ps.worker.checkpoints import CheckpointInfo

LOAD_FAILED: Final = "the checkpoint was not loaded, since that failed"

_LONGEST: Final = 2000
"""Characters of an error that the other workers are told."""


class AbstractRuntime(Uncopied):
    """The methods of a runtime, beside the order of events."""

    sent: SentGradients

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
        """Have another optimizer take the place of the model's with the next step; its moments begin anew, or stay."""
        raise NotImplementedError

    def retain_moments(self) -> None:
        """An optimizer that is to take the place of the model's goes on with its moments."""
        raise NotImplementedError

    @property
    def changes_optimizer(self) -> bool:
        """Whether another optimizer takes the place of the model's with the next step."""
        raise NotImplementedError

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of an optimizer of ours on this worker, by parameter and torch's names; empty with servers."""
        return {}

    def load_optimizer_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]], hyper: Sequence[Hyper]) -> None:
        """Set the optimizer's state on this worker, as `optimizer_state` gives it."""
        raise NotImplementedError

    def step(self, hyper: Sequence[Hyper], commit: Mapping[str, str]) -> StepResult:
        """Make a step of the gradients that there are, and commit these values with it."""
        raise NotImplementedError

    def standing(self) -> Standing:
        """This worker's place among those that take part in the next step, once all are there."""
        raise NotImplementedError

    @property
    def place(self) -> Place:
        """This worker's among those that take part in the next step, as far as it knows."""
        raise NotImplementedError

    @property
    def committed(self) -> Mapping[str, str]:
        """The newest values that were committed with steps, by name."""
        return {}

    def copy_from(self, other: Self, weight: float) -> StepResult:
        """A step that needs no gradients: the model becomes (1 - weight) * its values + weight * another's."""
        raise NotImplementedError

    def _push(self, flat: FlatUnit) -> None:
        """A unit's gradient is complete: give it to the other replicas."""
        raise NotImplementedError

    def masters(self) -> Iterator[torch.Tensor]:
        """Every unit's values, f32[unit_numel], in layout order; see `FullyShardedDataParallel.full_parameters`."""
        raise NotImplementedError

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        """Give every unit other values, f32[unit_numel], in layout order; those of the worker of lowest rank count."""
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        """A small value of every worker that has the model, in rank order; collective."""
        raise NotImplementedError

    def together(self, failed: str, perform: Callable[[], Any]) -> list[Any]:
        """A small value that `perform` gives on every worker, in rank order, once it has ended on all; collective.

        Args:
            failed: how the message begins that the others get if it fails on one.
            perform: what each worker does by itself.

        Raises:
            Exception: what `perform` raised here.
            Disagreement: what it raised on another worker blames what was given there.
            AxonError: it failed on another worker by an error of this class.
        """
        value, problem = None, None
        try:
            value = perform()
        except Exception as error:
            problem = error
        kind, text = ("", "") if problem is None else (type(problem).__name__, str(problem)[:_LONGEST])
        try:
            answers = self.gather({"value": value, "error": kind, "text": text})
        finally:
            if problem is not None:
                raise problem
        if failures := {rank: answer for rank, answer in enumerate(answers) if answer["error"]}:
            names = "; ".join(f"rank {rank}: {a['error']}: {a['text']}" for rank, a in failures.items())
            raise _error_of_another(next(iter(failures.values()))["error"])(f"{failed} on {names}")
        return [answer["value"] for answer in answers]

    def save(
        self,
        uri: str,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        states: Mapping[int, FileEntry],
        version: int | None,
    ) -> CheckpointInfo | None:
        """Write on the worker that writes; None on the others, which do not wait for it.

        `states` are the files that workers have written, by rank; see `FullyShardedDataParallel.save_checkpoint`.
        """
        raise NotImplementedError

    def load(self, uri: str, optimizer: torch.optim.Optimizer | None) -> CheckpointInfo:
        """See `FullyShardedDataParallel.load_checkpoint`."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what others have of the model."""

    def agree(self) -> None:
        """Before anything is gathered for a forward: settle with the other workers of a replica on a version."""

    def refresh(self) -> None:
        """Bring what stays of the parameters on this worker up to date, beside units that are resident."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of this step to a global L2 norm; the norm before, pending if servers compute it."""
        return self.sent.clip(max_norm)

    @property
    def shard_numel(self) -> int:
        """Elements of this worker's shards of units (HYBRID_SHARD)."""
        return 0

    @property
    def optimizer_bytes(self) -> int | None:
        """Memory of the state of our optimizer on this worker; None = there is none here."""
        return None


def _error_of_another(name: str) -> type[AxonError]:
    """The class of error for a worker on whose fellow an error of this name was raised."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AxonError) and not issubclass(kind, InvalidRequest):
        return kind
    return Disagreement
