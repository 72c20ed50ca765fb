"""The steps of a wrapped model, as an interface: `StepClient`, and `NodeSteps` for a node's workers, implement it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from axon_ps.collectives.work import Awaited
from axon_ps.data.elastic import Coordinates
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerChange, OptimizerSpec
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket

Position: TypeAlias = tuple[int, int]
"""(epoch, version) of values of a model."""


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """The facts by which samples are dealt, all of one moment.

    Attributes:
        generation: the generation of the members among whom they are dealt.
        coordinates: this worker's coordinates among them.
        committed: the newest values that were committed with steps of the model, by name.
    """

    generation: int
    coordinates: Coordinates
    committed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A batch that a loader has given to the program. The next backward's gradients are of this batch.

    Attributes:
        generation: the generation of the members among whom its samples were dealt. The step counts in no other.
        weight: the factor of its mean in the mean over all samples of the step.
        index: its number among the micro-batches of this worker in the step.
        count: the number of these micro-batches. Gradients are pushed behind the last one.
        commit: the values that the step commits if it ends with this batch, by name.
    """

    generation: int
    weight: float
    index: int
    count: int
    commit: Mapping[str, str]

    @property
    def is_last(self) -> bool:
        """True if the step's gradients are complete with it."""
        return self.index == self.count - 1


class Pending(Awaited, Protocol):
    """Something under way that can be cancelled."""

    def cancel(self) -> None:
        """Stop it. Its memory is not touched afterwards."""


class JobMembers(Protocol):
    """The job's members; see `JobView`."""

    def wait_complete(self) -> object:
        """Block until a step can be made."""


class View(Protocol):
    """The known state of the model; see `ModelView`."""

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
        """The number of committed steps."""

    @property
    def copied(self) -> int:
        """The version of the last copy from another model, which frozen units are of; 0 = there was none."""

    @property
    def latest(self) -> Position:
        """The newest (epoch, version) that this worker was notified of. The one it computes with may be older."""


def position_of(view: View, *, trainable: bool) -> Position:
    """Return the (epoch, version) that a unit's values must have now. No step but a copy changes a frozen unit."""
    return view.epoch, view.version if trainable else view.copied


class ParameterSteps(Protocol):
    """The client that gathers parameters."""

    def gather(self, unit: int, out: Any) -> Pending:
        """Fill `out` with a unit: an array, or a tensor if a node's groups are of device memory."""


class GradientSteps(Protocol):
    """The client that pushes gradients."""

    def push(self, unit: int, grad: Any, ticket: Ticket, done: Callable[[], None] | None = None) -> Pending:
        """Send this worker's gradient of a unit, scaled by 1 / `ticket.num_replicas` or the weight of its batch.

        It is an array or None, or a tensor if a node's groups are of device memory.
        """


class Steps(Protocol):
    """The steps of a model: parameters, gradients, votes and decisions; see `StepClient`."""

    @property
    def view(self) -> View:
        """The known state of the model."""

    @property
    def parameters(self) -> ParameterSteps:
        """The client that gathers parameters."""

    @property
    def gradients(self) -> GradientSteps:
        """The client that pushes gradients."""

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Give the job its optimizer."""

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Check that an optimizer can replace the job's."""

    def ticket(self, began: Position | None = None, dealt: int | None = None) -> Ticket:
        """Return the ticket of the step that is computed from (epoch, version) `began`.

        Its samples were dealt in the generation `dealt`. The ticket is void if `began` or `dealt` is not current.
        """

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        commit: Mapping[str, str] | None = None,
        weight: float | None = None,
        untouched: Iterable[int] = (),
        withdrawn: bool = False,
        optimizer: OptimizerChange | None = None,
    ) -> Decision:
        """Vote that all gradients were pushed, with these values to commit, and wait for the decision.

        The sum of all pushes is divided by the sum of all weights; None = by 1.
        `optimizer` replaces the model's with the step.
        """

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """Make a step in which the model becomes (1 - weight) * its values + weight * another's."""


class Mapped(Protocol):
    """A unit in shared memory that its server writes and this process reads; see `shard.same_host.shared_copy`."""

    @property
    def values(self) -> Array:
        """wire[unit_numel]; the same memory as long as the server lives."""

    def is_at(self, version: int) -> bool:
        """Return True if `values` are those of a version."""

    def discard_writes(self) -> None:
        """Undo all writes to `values` by this process."""


class ServerParameters(ParameterSteps, Protocol):
    """Parameters that come from the shard servers; see `worker.steps.parameters`."""

    def mapped(self, unit: int) -> Mapped | None:
        """Return a unit's current values, if they are mapped and there. They are not read beyond the next vote."""

    def map(self, unit: int, dtype: DType) -> Pending:
        """Map a unit once its current values are there; the result is a `Mapped`, or None if it must be gathered."""

    def is_near(self, unit: int) -> bool:
        """Return True if a unit is copied from memory of servers of this host."""

    def gather_speculative(self, unit: int, out: Any, ticket: Ticket, hyper: Sequence[Hyper]) -> Pending:
        """Fill `out`, before the step is decided, with a unit as an unclipped step with `hyper` would make it."""


class ServerSteps(Steps, Protocol):
    """Steps of a worker whose parameters come from the shard servers; see `StepClient`."""

    @property
    def parameters(self) -> ServerParameters:
        """The client that gathers parameters."""
