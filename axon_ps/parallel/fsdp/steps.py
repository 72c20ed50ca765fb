"""The needs of a wrapped model to make steps: implemented by `StepClient`, and by `NodeSteps` for a node's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from axon_ps.collectives.work import Awaited
from axon_ps.data.elastic import Place
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerChange, OptimizerSpec
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket

Position: TypeAlias = tuple[int, int]
"""(epoch, version): which values of a model."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The facts by which samples are dealt; read at one moment.

    Attributes:
        generation: the members among whom they are dealt.
        place: this worker's among them.
        committed: the newest values that were committed with steps of the model, by name.
    """

    generation: int
    place: Place
    committed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A batch that a loader has given to the program: what the next backward's gradients are of.

    Attributes:
        generation: the members among whom its samples were dealt; the step counts only among them.
        weight: what the mean over it is multiplied by in the mean over all samples of the step.
        index: its number among the micro-batches of this worker in the step.
        count: how many these are. Gradients are pushed behind the last one.
        commit: what the step commits if it ends with this batch, by name.
    """

    generation: int
    weight: float
    index: int
    count: int
    commit: Mapping[str, str]

    @property
    def is_last(self) -> bool:
        """Whether the step's gradients are complete with it."""
        return self.index == self.count - 1


class Pending(Awaited, Protocol):
    """Something under way that can be cancelled."""

    def cancel(self) -> None:
        """Stop it; its memory is not touched afterwards."""


class JobMembers(Protocol):
    """The job's members; see `JobView`."""

    def wait_complete(self) -> object:
        """Block until a step can be made."""


class View(Protocol):
    """The state of the model that is known; see `ModelView`."""

    @property
    def job(self) -> JobMembers:
        """The job's members."""

    @property
    def epoch(self) -> int:
        """The number of times that the parameters were replaced from outside."""

    @property
    def asked_epoch(self) -> int:
        """The newest epoch that this worker asked for, or waited for."""

    @property
    def version(self) -> int:
        """Committed steps."""

    @property
    def copied(self) -> int:
        """The newest version that took another model's values, which frozen units are of; 0 = none."""

    @property
    def latest(self) -> Position:
        """The newest (epoch, version) that this worker was notified of; those it computes with may be older."""


def position_of(view: View, *, trainable: bool) -> Position:
    """(epoch, version) that a unit's values must have now; no step changes a frozen unit but one that copies."""
    return view.epoch, view.version if trainable else view.copied


class ParameterSteps(Protocol):
    """The client that gathers parameters."""

    def gather(self, unit: int, out: Any) -> Pending:
        """Fill `out` with a unit: an array; a tensor in device memory where a node's groups are."""


class GradientSteps(Protocol):
    """The client that takes gradients."""

    def push(self, unit: int, grad: Any, ticket: Ticket, done: Callable[[], None] | None = None) -> Pending:
        """Give this worker's gradient of a unit, scaled by 1 / `ticket.num_replicas`: an array, or None; a tensor in
        device memory where a node's groups are."""


class Steps(Protocol):
    """The steps of a model: what they are made of, and who decides; see `StepClient`."""

    @property
    def view(self) -> View:
        """The state of the model that is known."""

    @property
    def parameters(self) -> ParameterSteps:
        """The client that gathers parameters."""

    @property
    def gradients(self) -> GradientSteps:
        """The client that takes gradients."""

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Give the job its optimizer."""

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Check that an optimizer can take the place of the job's."""

    def ticket(self, began: Position | None = None, dealt: int | None = None) -> Ticket:
        """The ticket of the step that is computed from (epoch, version) `began`, of samples that were dealt in the
        generation `dealt`; void if those are over."""

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        commit: Mapping[str, str] | None = None,
        untouched: Iterable[int] = (),
        withdrawn: bool = False,
        optimizer: OptimizerChange | None = None,
    ) -> Decision:
        """Vote: all gradients were pushed, and these values are to be committed with them; wait for the decision.

        `optimizer` takes the place of the model's with the step.
        """

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """A step in which the model becomes (1 - weight) * its values + weight * another's."""


class Mapped(Protocol):
    """A unit in shared memory that its server writes and this process reads; see `shard.same_host.shared_copy`."""

    @property
    def values(self) -> Array:
        """wire[unit_numel]; the same memory as long as the server lives."""

    def is_at(self, version: int) -> bool:
        """Whether `values` are, and have been since they were found to be, those of a version."""

    def discard_writes(self) -> None:
        """Undo whatever was written to `values` here."""


class ServerParameters(ParameterSteps, Protocol):
    """Parameters that come from the shard servers; see `worker.steps.parameters`."""

    def mapped(self, unit: int) -> Mapped | None:
        """A unit's current values, if they are mapped and there. Nobody reads them beyond the next vote."""

    def map(self, unit: int, dtype: DType) -> Pending:
        """Map a unit once its current values are there; the result is a `Mapped`, or None: it must be gathered."""

    def is_near(self, unit: int) -> bool:
        """Whether a unit is copied from memory of servers of this host."""

    def gather_speculative(self, unit: int, out: Any, ticket: Ticket, hyper: Sequence[Hyper]) -> Pending:
        """Before the step is decided, fill `out` with a unit as an unclipped step with `hyper` would make it."""


class ServerSteps(Steps, Protocol):
    """Steps of a worker by itself: parameters come from the shard servers; see `StepClient`."""

    @property
    def parameters(self) -> ServerParameters:
        """The client that gathers parameters."""
