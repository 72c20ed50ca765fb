"""`Speculation`: gathers of values before the step that makes them is decided.

Note: [Speculative gathers]
    Under SHARD_GRAD_OP the full model would be pushed one way, and only then pulled the other way. When gradients are
    not clipped, a unit's servers can compute its new values as soon as every replica has pushed it. So each unit is
    gathered right behind its own push, with the optimizer's present hyperparameters as the expected ones. `step()`
    commits the values if the decision is as expected, and discards them if not. So no forward reads values of a step
    that did not commit. Values that must be cast or copied to a GPU come into a buffer: a second copy of the
    parameters, in wire dtype. Others overwrite the current values. Gathers are speculative only in a step that follows
    one without clipping.
    Under FULL_SHARD the units that the next forward needs first are gathered in this way, as many as fit into memory.
    They come straight into their own memory, which backward has freed. Values that must be cast or copied are not
    gathered in this way. Units with a host copy are all gathered in this way, into that copy.
    Units on servers of this host are not gathered in this way (`sources.RemoteSource`).
    If a step has several addends, only values after the last one are of use. As many are expected as the step before
    had. If another one comes, the gathers are discarded, and the servers discard what they have prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit
from axon_ps.parallel.fsdp.gathering import UnitGathering
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Decision, Hyper
from axon_ps.worker.steps.ticket import Ticket


class Speculation:
    """The speculative gathers of the step under way.

    Args:
        flats: the flat units of the model.
        first_parameter: by unit, the number of its first parameter.
        gathering: the units that are in memory.

    """

    def __init__(self, flats: Sequence[FlatUnit], first_parameter: Mapping[int, int], gathering: UnitGathering) -> None:
        self._flats = flats
        self._first_parameter = first_parameter
        self._gathering = gathering
        self._ticket: Ticket | None = None
        self._expected: Sequence[Hyper] | None = None
        self._unclipped = False
        self._last_addend = 0

    def may_begin(self, ticket: Ticket, precision: WirePrecision) -> bool:
        """Return True if values may be gathered before a step is decided.

        The step is expected to be unclipped, and to end with this addend, as the last step did. Values by tensor need
        all of a tensor.
        """
        likely = self._unclipped and ticket.addend == self._last_addend
        return likely and not (ticket.is_void or precision.by_tensor)

    def begin(self, ticket: Ticket, hyper: Sequence[Hyper] | None) -> None:
        """Expect these hyperparameters in the vote for a step; None = nothing is expected."""
        if self._expected is not None:  # of the addend before it
            self.settle(None)
        self._ticket, self._expected = ticket, hyper

    def end(self, decision: Decision | None, *, clipped: bool) -> None:
        """End the step, and expect the next one to be alike. Rest as of `settle`."""
        if self._ticket is not None:
            self._unclipped, self._last_addend = not clipped, self._ticket.addend
        self.settle(decision)

    def gather(self, unit: ModuleUnit, flat: FlatUnit) -> None:
        """Gather a unit behind its push, as the step is expected to leave it, if it stays here or is needed first."""
        if self._expected is None or self._ticket is None or not flat.may_speculate:
            return
        if flat.resident or flat.source.retains or self._gathering.is_first(unit, flat):
            flat.start_speculative(self._ticket, self._expected)

    def settle(self, decision: Decision | None) -> None:
        """Commit the gathers of units that were updated as expected, and discard the others; None = discard all."""
        as_expected = decision is not None and self._expected is not None and decision.applies(self._expected)
        untouched = set() if decision is None else set(decision.untouched)
        for flat in self._flats:
            first = self._first_parameter[flat.index]
            if as_expected and untouched.isdisjoint(range(first, first + len(flat.params))):
                flat.commit_speculative()
            else:
                flat.discard_speculative()
        self._expected = None
