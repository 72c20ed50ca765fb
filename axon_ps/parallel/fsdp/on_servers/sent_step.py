"""`SentStep`: the gradients that this worker has sent for the step under way.

Note: [Sending again]
    An aborted step has changed no parameter, so the gradients that were sent for it are still those of the present
    version. For a training loop that cannot make its batch again, the runtime retains a copy of the gradients sent
    (`resends` > 0). It sends them for the next attempt, scaled to the number of replicas then. The batch of a replica
    that has left is lost. A replica that has joined sends its own.

Note: [Several backwards]
    Each backward outside `no_sync()` makes another addend of the step's gradient (`shard.core.gradients`, Note:
    [Addends]). Every unit has a push in every addend, since workers may use different units. A unit without a gradient
    in a backward is pushed as absent when the next backward begins to push, or with the step. So the number of addends
    is that of the backwards, whichever units they use. Backwards inside one of reentrant checkpoints are not counted,
    unless a unit gets a second gradient in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from axon_ps.parallel.fsdp.flat_unit import FlatUnit
from axon_ps.parallel.fsdp.forwards import in_reentrant_checkpoint
from axon_ps.parallel.fsdp.sources import array_of
from axon_ps.parallel.fsdp.steps import GradientSteps, Pending
from axon_ps.parallel.precision import TORCH_DTYPES
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
        self._params: dict[int, nn.Parameter] = {}  # by number, those of the units that were pushed
        self._given: set[int] = set()  # numbers of those that have a gradient
        self._pushed: set[int] = set()  # units of the present addend
        self._is_over = False  # True if the backward of the present addend has ended
        self.pushes: list[Pending] = []

    def __contains__(self, unit: int) -> bool:
        return unit in self._pushed

    # ------------------------------------------------------------------ addends

    def begins_addend(self, unit: int) -> bool:
        """Return True if a gradient of a unit is of another addend. See Note: [Several backwards]."""
        return self._is_over or unit in self._pushed

    def end_backward(self) -> None:
        """Record the end of a backward: later ones make another addend, if it has sent anything."""
        self._is_over = bool(self._pushed) and not in_reentrant_checkpoint()

    def add_to_last(self) -> None:
        """Let gradients that do not come from a backward be of the present addend."""
        self._is_over = False

    def begin_addend(self) -> None:
        """Begin another addend. Every unit must have been pushed for the one before."""
        self._pushed, self._is_over = set(), False

    # ------------------------------------------------------------------ pushes

    def lacks(self, flat: FlatUnit, zeroed: set[nn.Parameter]) -> bool:
        """Return True if a unit was not pushed in the present addend, and has parameters whose gradients are zeros."""
        return flat.index not in self._pushed and not zeroed.isdisjoint(flat.params)

    def pack(self, flat: FlatUnit, out: torch.Tensor, scale: float, zeroed: set[nn.Parameter]) -> None:
        """Move the gradients of a unit to `out`, multiplied by `scale`. Those in `zeroed` count as zeros if absent."""
        if scale:
            given = [p for p, has in zip(flat.params, flat.grads.pack(out, scale), strict=True) if has]
        else:  # not 0 times them, which may be NaN
            flat.grads.pop()
            out.zero_()
            given = []
        self._note(flat, zeroed.union(given))

    def push(
        self, flat: FlatUnit, packed: torch.Tensor, ticket: Ticket, done: Callable[[], None], *, retains: bool
    ) -> None:
        """Send a packed gradient of a unit, and retain a copy if it may be sent again."""
        if not flat.pushes:
            done()
            return
        if retains:
            before = self._retained.get(flat.index)
            self._retained[flat.index] = packed.clone() if before is None else before.float().add_(packed)
        self.pushes.append(self._gradients.push(flat.index, self._form(packed), ticket, done))

    def push_absent(self, flats: Iterable[FlatUnit], ticket: Ticket, zeroed: set[nn.Parameter]) -> None:
        """Tell the servers that the units that were not pushed have no gradient in the present addend."""
        for flat in flats:
            if flat.trainable and flat.index not in self._pushed:
                self._note(flat, zeroed)
                if flat.pushes:
                    self._retained.setdefault(flat.index, None)
                    self.pushes.append(self._gradients.push(flat.index, None, ticket))

    def push_again(self, before: Ticket, ticket: Ticket) -> list[Pending]:
        """Send the retained gradients, for another attempt at the step; see Note: [Sending again]."""
        pushes = []
        for unit, copy in self._retained.items():
            if copy is not None and before.num_replicas != ticket.num_replicas:
                copy.mul_(before.num_replicas / ticket.num_replicas)
            pushes.append(self._gradients.push(unit, None if copy is None else self._form(copy), ticket))
        return pushes

    def end(self) -> None:
        """Forget the gradients and pushes, since the step has ended."""
        self.pushes = []
        self._params.clear()
        self._given.clear()
        self._retained.clear()
        self.begin_addend()

    # ------------------------------------------------------------------ parameters

    @property
    def untouched(self) -> list[int]:
        """Numbers of the parameters of which this worker has no gradient in the step, or pushes none."""
        return sorted({*self._foreign, *self._params.keys() - self._given})

    @property
    def applied(self) -> list[nn.Parameter]:
        """The parameters that have a gradient in the step."""
        return [self._params[number] for number in self._given]

    def _note(self, flat: FlatUnit, given: set[nn.Parameter]) -> None:
        numbered = dict(enumerate(flat.params, self._first_parameter[flat.index]))
        self._params |= numbered
        self._given.update(number for number, param in numbered.items() if param in given)
        self._pushed.add(flat.index)

    def _form(self, packed: torch.Tensor) -> Array | torch.Tensor:
        """Return a packed gradient in the form in which `GradientSteps.push` takes it."""
        packed = packed.to(TORCH_DTYPES[self._wire])
        return packed if self._on_device else array_of(packed, self._wire)
