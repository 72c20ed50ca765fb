"""`UnitGathering`: the units that are in memory, gathered when they are needed or before, and resharded.

`GatherOrder` predicts the order in which units will be needed: the last iteration's is expected for this one.

Note: [Memory]
    Under FULL_SHARD the parameters in memory are the root, the unit in use and one more. The next unit is gathered
    while its memory and the memory in use stay within a budget. The budget is twice the largest unit and, if round
    trips are long, the bytes that fill the connections to the servers for a round trip (`shard.client.line`). Backward
    first needs the units that forward used last. They are not resharded in between if they fit, and so are not gathered
    twice. Frozen units that are retained in other memory (`wrap`, Note: [Frozen parameters stay]) and all others are
    counted apart for that, and the others have an eighth of the retained bytes in addition. So adapters are gathered
    once in a step, although the weights that they adapt do not fit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from axon_ps.parallel.fsdp.flat_unit import FlatUnit, ModuleUnit
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.parallel.fsdp.stats import RETAINED_PER_BYTE
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.parallel.markers import Markers

BUFFERS = 2
"""Limit of the prefetched gathers, and of the pushes under way, as a multiple of the largest unit."""

_NOTHING = contextlib.nullcontext()


def ordinary_tensors() -> AbstractContextManager[object]:
    """Let ordinary tensors be made, also if the user's code is in inference mode: they outlive it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


_FORGET_AFTER = 64


class GatherOrder:
    """Predicts the next units from the order of the last complete iteration.

    Args:
        expected: the order to expect before anything was seen.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._seen: list[int] = []
        self._next = 0
        self._limit = _FORGET_AFTER * max(1, len(self._expected))

    def visit(self, unit: int) -> None:
        """Record that `unit` is needed now."""
        if len(self._seen) >= self._limit:  # forwards without a backward, for ever: not an iteration
            self.restart()
        self._seen.append(unit)
        for start in (self._next, 0):
            try:
                self._next = self._expected.index(unit, start) + 1
                return
            except ValueError:
                continue

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected after the last one visited, in order, repetitions included."""
        yield from self._expected[self._next :]

    def first(self) -> Iterator[int]:
        """Yield the units expected in the next iteration, in order, repetitions included."""
        yield from self._expected

    def finish(self) -> None:
        """End a complete iteration: its order is expected from now on."""
        if self._seen:
            self._expected = self._seen
        self.restart()

    def restart(self) -> None:
        """Begin again at the first unit. The expected order stays."""
        self._seen = []
        self._next = 0


class UnitGathering:
    """The units of a model that are in memory.

    Args:
        wrapping: the options with which the model is wrapped.
        units: module units; the first is the root.
        buffers: buffers for gathers that cannot come into their unit.
        markers: the parts of its steps, for profilers and traces.
        free: called for a unit that backward is done with, in place of `reshard`.

    Attributes:
        training: True if a backward follows the present forward.
        prefetched: True if a prefetch by hand is pending.
    """

    def __init__(
        self,
        wrapping: Wrapping,
        units: Sequence[ModuleUnit],
        buffers: BufferPool,
        markers: Markers,
        free: Callable[[ModuleUnit], None],
    ) -> None:
        self._units = units
        self._buffers = buffers
        self._markers = markers
        self._free = free
        self._counters = wrapping.counters
        self._eager = wrapping.prefetch and not wrapping.replicated
        self._least_bytes = BUFFERS * max((u.nbytes for u in units[1:]), default=units[0].nbytes)
        retained_bytes = sum(flat.wire_bytes for unit in units for flat in unit.flats if flat.retained)
        self._beside_retained_bytes = retained_bytes // RETAINED_PER_BYTE
        self.extend(0)
        self._orders = _first_orders(len(units))
        self._finished: list[ModuleUnit] = []  # units with which backward seems to be done
        self.training = True
        self.prefetched = False

    def extend(self, extra_bytes: int) -> None:
        """Extend the budget before it is needed. See Note: [Memory]."""
        self._budget_bytes = self._least_bytes + self._beside_retained_bytes + extra_bytes
        self._buffers.extend(extra_bytes)

    # ------------------------------------------------------------------ use

    def begin_forward(self, *, training: bool) -> None:
        """Begin a forward of the model."""
        self.prefetched, self.training = False, training
        self._orders[not training].restart()

    def need(self, unit: ModuleUnit) -> None:
        """Unshard a unit, block until it is unsharded, and begin to gather the next units."""
        finished, self._finished = self._finished, []
        for other in finished:  # backward has come to another one
            if other is not unit:
                self._free(other)
        self._orders[self.training].visit(unit.number)
        began = time.perf_counter()
        with self._markers.within("gather wait", unit.name), ordinary_tensors():
            for flat in unit.flats:
                flat.start_gather()
            for flat in unit.flats:
                flat.unshard()
        self._counters.gather_wait_s += time.perf_counter() - began
        self.prefetch()

    def used(self, unit: ModuleUnit) -> None:
        """Reshard a unit whose forward is over, unless backward needs it soon. Begin to gather the next units."""
        if not self.training:
            self.reshard(unit)
            if unit.is_root:
                self._orders[False].finish()
        elif not unit.is_root:
            upcoming = list(self._orders[True].upcoming())
            for retained in sorted({flat.retained for flat in unit.flats}):
                if not self._needed_soon(unit, upcoming, retained=retained):
                    self.reshard(unit, retained=retained)
        self.prefetch()

    def finish(self, unit: ModuleUnit) -> None:
        """Record that backward is done with a unit. See `runtime`, Note: [When memory may be freed in backward]."""
        if not unit.is_root and unit not in self._finished:
            self._finished.append(unit)

    def end_backward(self) -> None:
        """End a backward, whose order is expected from now on."""
        self._orders[True].finish()

    def forget_backward(self) -> None:
        """Forget the units with which backward was done: it has ended."""
        self._finished.clear()

    def drop_backward(self) -> None:
        """Forget a backward that was broken off."""
        self._finished.clear()
        self._orders[True].restart()

    def reshard(self, unit: ModuleUnit, *, retained: bool | None = None) -> None:
        """Reshard a unit, or only its retained or other flat units, unless a graph of a gradient reads it."""
        for flat in () if unit.held else unit.flats:
            if retained in (None, flat.retained):
                flat.reshard()

    # ------------------------------------------------------------------ before use

    def prefetch(self, *, by_hand: bool = False) -> None:
        """Start gathering the next units expected, as far as Note: [Memory] allows."""
        if not (self._eager or by_hand):
            return
        for number in self._orders[self.training].upcoming():
            unit = self._units[number]
            for flat in [f for f in unit.flats if f.missing]:
                if not unit.is_root and self._reshardable_bytes() + flat.gather_bytes > self._budget_bytes:
                    return
                if not self._buffers.has_capacity(flat.gather_bytes):
                    return
                with ordinary_tensors():
                    flat.start_gather()

    def prefetch_by_hand(self) -> None:
        """Begin to gather the units that the next forward needs first."""
        self._orders[True].restart()
        self.training, self.prefetched = True, True
        self.prefetch(by_hand=True)

    def is_first(self, unit: ModuleUnit, flat: FlatUnit) -> bool:
        """Return True if the next forward needs a unit first, and memory for it is within the budget now."""
        if not (self._eager and self._needed_soon(unit, self._orders[True].first(), retained=flat.retained)):
            return False
        return unit.is_root or self._reshardable_bytes() + flat.nbytes <= self._budget_bytes

    def _needed_soon(self, unit: ModuleUnit, upcoming: Iterable[int], *, retained: bool) -> bool:
        """Return True if the unit is among the upcoming ones that fit into the budget. See Note: [Memory].

        Args:
            unit: the unit.
            upcoming: the numbers of the next ones.
            retained: True to count only frozen units that are retained, False to count only the others.
        """
        free_bytes = self._budget_bytes - (self._beside_retained_bytes if retained else 0)
        for number in dict.fromkeys(upcoming):
            other = self._units[number]
            counted = () if other.is_root else [f for f in other.flats if f.retained is retained]
            free_bytes -= sum(f.unsharded_bytes for f in counted)
            if free_bytes < 0:
                return False
            if other is unit:
                return True
        return False

    def _reshardable_bytes(self) -> int:
        """Return the memory of parameters beside the root: gathered, and under way."""
        return sum(f.reshardable_bytes for u in self._units[1:] for f in u.flats)

    # ------------------------------------------------------------------ by hand

    def gather(self, units: Iterable[ModuleUnit]) -> None:
        """Unshard these units, and block until they are."""
        with ordinary_tensors():
            for unit in units:
                for flat in unit.flats:
                    flat.start_gather()
                    flat.unshard()

    def reset(self) -> None:
        """Reshard everything, units that are held too, and drop idle buffers."""
        self.prefetched = False
        for unit in self._units:
            unit.depth, unit.held = 0, False
            for flat in unit.flats:
                flat.discard_speculative()
            self.reshard(unit)
        self._buffers.trim()

    def forget_orders(self) -> None:
        """Forget the order in which units are needed."""
        self._orders = _first_orders(len(self._units))


def _first_orders(units: int) -> dict[bool, GatherOrder]:
    """Return the orders in which units are expected at first, with and without a backward."""
    numbers = list(range(units))
    return {True: GatherOrder(numbers + numbers[::-1]), False: GatherOrder(numbers)}
