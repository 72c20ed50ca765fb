"""Gathers before a decision: which units, and whether they are retained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.compress.float8 import Float8
from axon_ps.parallel.fsdp.on_servers.speculation import Speculation
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Decision, Outcome
from axon_ps.worker.steps.ticket import Ticket

HYPER = ({"lr": 0.1},)
F32 = WirePrecision()
TICKET = Ticket(generation=1, step=0, replica=0, num_replicas=1)


class Flat:
    """A unit of two parameters that notes what becomes of its speculative gather."""

    def __init__(self, index: int, *, resident: bool = True) -> None:
        self.index = index
        self.params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
        self.resident = resident
        self.may_speculate = True
        self.source = SimpleNamespace(retains=False)
        self.log: list[str] = []

    def start_speculative(self, ticket: Ticket, hyper: Any) -> None:
        self.log.append("started")

    def commit_speculative(self) -> None:
        self.log.append("committed")

    def discard_speculative(self) -> None:
        self.log.append("discarded")


def made(*flats: Flat, first: bool = False) -> Speculation:
    given: Any = flats
    gathering: Any = SimpleNamespace(is_first=lambda unit, flat: first)
    return Speculation(given, {flat.index: 2 * flat.index for flat in flats}, gathering)


def decision(outcome: Outcome = Outcome.COMMIT, clip: float = 1.0, untouched: tuple[int, ...] = ()) -> Decision:
    return Decision(
        step=0,
        generation=1,
        outcome=outcome,
        version=1,
        grad_norm=1.0,
        clip_factor=clip,
        hyper=HYPER,
        reason="",
        untouched=untouched,
    )


@pytest.mark.parametrize(
    ("resident", "first", "gathers"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_unit_is_gathered_that_stays_or_is_needed_first(resident: bool, first: bool, gathers: bool) -> None:
    flat: Any = Flat(0, resident=resident)
    unit: Any = None
    speculation = made(flat, first=first)
    speculation.gather(unit, flat)
    assert flat.log == [], "nothing is expected yet"
    speculation.begin(TICKET, HYPER)
    speculation.gather(unit, flat)
    assert flat.log == ["started"] * gathers


def test_gathers_are_retained_as_expected_but_of_units_with_parameters_that_have_no_gradient() -> None:
    flats = [Flat(0), Flat(1)]
    speculation = made(*flats)
    speculation.begin(TICKET, HYPER)
    speculation.settle(decision(untouched=(3,)))
    assert [flat.log for flat in flats] == [["committed"], ["discarded"]]


def test_gathers_behind_an_addend_are_discarded_when_another_one_begins() -> None:
    flat: Any = Flat(0)
    unit: Any = None
    speculation = made(flat)
    speculation.begin(TICKET, HYPER)
    speculation.gather(unit, flat)
    speculation.begin(TICKET.next_addend(), None)
    speculation.gather(unit, flat)
    assert flat.log == ["started", "discarded"]


def test_a_step_is_expected_to_be_as_the_one_before() -> None:
    speculation, second = made(), TICKET.next_addend()
    assert not speculation.may_begin(TICKET, F32), "the first one may be clipped"
    speculation.begin(TICKET, None)
    speculation.end(decision(), clipped=False)
    assert (speculation.may_begin(TICKET, F32), speculation.may_begin(second, F32)) == (True, False)
    assert not speculation.may_begin(TICKET.void("it has left"), F32)
    speculation.begin(TICKET, HYPER)
    speculation.begin(second, None)
    speculation.end(decision(), clipped=False)
    assert (speculation.may_begin(TICKET, F32), speculation.may_begin(second, F32)) == (False, True)
    assert not speculation.may_begin(second, WirePrecision(param_compression=Float8(rest_bits=16)))
    speculation.begin(second, HYPER)
    speculation.end(decision(), clipped=True)
    assert not speculation.may_begin(second, F32)


@pytest.mark.parametrize("decided", [None, decision(Outcome.ABORT), decision(Outcome.SKIP), decision(clip=0.5)])
def test_they_are_discarded_after_any_other_decision(decided: Decision | None) -> None:
    flat: Any = Flat(0)
    speculation = made(flat)
    speculation.begin(TICKET, HYPER)
    speculation.settle(decided)
    assert flat.log == ["discarded"]
    unit: Any = None
    speculation.gather(unit, flat)
    assert flat.log == ["discarded"], "nothing is expected any more"
