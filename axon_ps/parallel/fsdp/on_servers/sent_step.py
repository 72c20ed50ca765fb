"""`SentStep`: the gradients that this worker has sent for the step under way.

Note: [Sending again]
    An aborted step has changed no parameter, so the gradients that were sent for it are still those of the present
    version. For a training loop that cannot make its batch again, the runtime retains a copy of the gradients sent
    (`resends` > 0). It sends them for the next attempt, scaled to the number of replicas then. The batch of a replica
    that has left is lost. A replica that has joined sends its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.parallel.fsdp.steps import GradientSteps, Pending
from axon_ps.types import Array, DType
from axon_ps.worker.steps.ticket import Ticket


class SentStep:
    """The gradients that were sent for the step under way.

    Args:
        gradients: sends them.
        first_parameter: by unit, the number of its first parameter.
        wire: the dtype of packed gradients.
        on_device: True if they are sent from device memory.
        foreign: numbers of the trainable parameters whose gradients other lines of the mesh push.

    Attributes:
        pushes: the transfers under way.
        untouched: numbers of the parameters of which this worker has no gradient in the step, or pushes none.
        applied: the parameters that have one.
    """

    def __init__(
        self,
        gradients: GradientSteps,
        first_parameter: Mapping[int, int],
        wire: DType,
        *,
        on_device: bool,
        foreign: Sequence[int] = (),
    ) -> None:
        self._gradients = gradients
        self._first_parameter = first_parameter
        self._wire = wire
        self._on_device = on_device
        self._foreign = foreign
        self._retained: dict[int, torch.Tensor | None] = {}  # by unit
        self.pushes: list[Pending] = []
        self.untouched: list[int] = [*foreign]
        self.applied: list[nn.Parameter] = []

    def form(self, packed: torch.Tensor) -> Array | torch.Tensor:
        """Return a packed gradient in the form in which `GradientSteps.push` takes it."""
        return packed if self._on_device else array_of(packed, self._wire)

    def note(self, flat: FlatUnit, given: Iterable[bool], zeroed: Iterable[nn.Parameter]) -> None:
        """Record which parameters of a unit have a gradient, of zeros for those in `zeroed`."""
        for number, (param, has) in enumerate(zip(flat.params, given, strict=True), self._first_parameter[flat.index]):
            if has or param in zeroed:
                self.applied.append(param)
            elif flat.pushes:
                self.untouched.append(number)

    def push_nothing(self, flat: FlatUnit, ticket: Ticket) -> None:
        """Tell the servers that a unit has no gradient."""
        if flat.pushes:
            self.pushes.append(self._gradients.push(flat.index, None, ticket))

    def retain(self, unit: int, packed: torch.Tensor | None) -> None:
        """Retain a copy of a unit's gradient, which may be sent again."""
        self._retained[unit] = None if packed is None else packed.clone()

    def push_again(self, before: Ticket, ticket: Ticket) -> list[Pending]:
        """Send the retained gradients, for another attempt at the step; see Note: [Sending again]."""
        pushes = []
        for unit, copy in self._retained.items():
            if copy is not None and before.num_replicas != ticket.num_replicas:
                copy.mul_(before.num_replicas / ticket.num_replicas)
            pushes.append(self._gradients.push(unit, None if copy is None else self.form(copy), ticket))
        return pushes

    def end(self) -> None:
        """Forget the gradients and pushes, since the step has ended."""
        self.pushes, self.untouched, self.applied = [], [*self._foreign], []
        self._retained.clear()
