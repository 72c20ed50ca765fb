"""The load of each member: bytes, memory and CPU as it reports them, lag and slices as the coordinator sees them. Pure.

A member's heartbeat may have metrics. Those named below are understood. Rates are computed from the totals.

Note: [Rates over whole steps]
    A member sends in bursts, once a step. So a rate over the second between two heartbeats means nothing if steps take
    longer. While a model steps, rates are computed over whole steps: from one decision to a later one. Totals come with
    heartbeats, and a total is used if its heartbeat comes after the burst around the decision: in the second half of a
    step. Steps shorter than `SETTLED_S` may have no heartbeat in that half. Then rates are computed over at least
    `MOST_STEPS` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from axon_ps.coordinator.core.history.step_rate import Rhythm
from axon_ps.types import Role
from axon_ps.wire import codec
from axon_ps.wire.v1 import watch_pb2

SENT_BYTES: Final = "sent_bytes"
"""Metric: bytes that the process has sent since it began."""

RECEIVED_BYTES: Final = "received_bytes"
MEMORY_BYTES: Final = "memory_bytes"
CPU_S: Final = "cpu_s"
"""Metric: seconds of CPU that the process has used."""

_RATES: Final = {SENT_BYTES: "sent_bytes_per_s", RECEIVED_BYTES: "received_bytes_per_s", CPU_S: "cpu"}

SETTLED_S: Final = 2.0
"""Steps of at least this duration have a heartbeat in their second half."""

MOST_STEPS: Final = 8
"""Number of shorter steps after which rates are computed, in any part of a step."""

MemberKey = tuple[Role, int]
"""Role and rank."""


@dataclass
class Load:
    """The figures that are known of a member.

    Attributes:
        message: for readers.
        totals: its newest metrics.
        begin: the metrics from which the next rates are computed.
        begin_s: the end of the last step that is in these metrics.
        begin_at: the model that steps, and its step at `begin_s`; None = no model stepped.
    """

    message: watch_pb2.MemberLoad
    totals: Mapping[str, float] = field(default_factory=dict)
    begin: Mapping[str, float] = field(default_factory=dict)
    begin_s: float = 0.0
    begin_at: tuple[int, int] | None = None

    def take_rates(self, at_s: float, rhythm: Rhythm | None) -> None:
        """Compute the rates from new totals; see Note: [Rates over whole steps]."""
        goes_on = rhythm is None
        if rhythm is not None:
            goes_on = self.begin_at is not None and self.begin_at[0] == rhythm.model
            steps = rhythm.steps - self.begin_at[1] if goes_on and self.begin_at is not None else 1
            settled = (
                rhythm.since_s >= rhythm.step_s / 2
                if rhythm.step_s >= SETTLED_S
                else steps >= MOST_STEPS or not goes_on
            )
            if not steps or not settled:
                return
            at_s -= rhythm.since_s
        if self.begin and goes_on and (elapsed_s := at_s - self.begin_s) > 0:
            for name, rate in _RATES.items():
                grown = self.totals.get(name, 0.0) - self.begin.get(name, 0.0)
                setattr(self.message, rate, max(0.0, float(f"{grown / elapsed_s:.4g}")))
        self.begin, self.begin_s = self.totals, at_s
        self.begin_at = None if rhythm is None else (rhythm.model, rhythm.steps)


class Loads:
    """The loads of all members, and those that have changed since `take_new`."""

    def __init__(self) -> None:
        self._loads: dict[MemberKey, Load] = {}
        self._new: set[MemberKey] = set()
        self._measured: set[MemberKey] = set()

    def measured(
        self, member: MemberKey, metrics: Mapping[str, float], at_s: float, rhythm: Rhythm | None = None
    ) -> None:
        """Take the metrics that a member has reported. `rhythm` is that of a training model."""
        load = self._load(member)
        load.totals = dict(metrics)
        load.take_rates(at_s, rhythm)
        load.message.memory_bytes = metrics.get(MEMORY_BYTES, 0.0)
        load.message.reported_s = at_s
        self._measured.add(member)

    def changed(self, member: MemberKey, **values: float) -> None:
        """Set values that the coordinator has determined for a member."""
        load = self._loads.get(member) or self._load(member)
        for name, value in values.items():
            if getattr(load.message, name) != value:
                setattr(load.message, name, value)
                self._new.add(member)

    def only(self, members: set[MemberKey]) -> None:
        """Forget all but these members."""
        self._loads = {member: load for member, load in self._loads.items() if member in members}

    def bytes_per_s(self) -> float | None:
        """Return the bytes per second that all members send together; None = no member reports it."""
        known = [load.message.sent_bytes_per_s for load in self._loads.values() if SENT_BYTES in load.totals]
        return sum(known) if known else None

    def take_new(self) -> list[watch_pb2.MemberLoad]:
        """Return the loads that have changed since the last call of this method."""
        new, self._new = self._new, set()
        measured, self._measured = self._measured, set()
        return [_message(load, with_metrics=p in measured) for p, load in self._loads.items() if p in new]

    def everything(self) -> list[watch_pb2.MemberLoad]:
        """Return the loads of all members."""
        return [_message(load, with_metrics=True) for load in self._loads.values()]

    def _load(self, member: MemberKey) -> Load:
        self._new.add(member)
        if member not in self._loads:
            role, rank = member
            self._loads[member] = Load(watch_pb2.MemberLoad(role=codec.role_to_proto(role), rank=rank))
        return self._loads[member]


def _message(load: Load, *, with_metrics: bool) -> watch_pb2.MemberLoad:
    message = watch_pb2.MemberLoad()
    message.CopyFrom(load.message)
    if with_metrics:
        message.metrics.update(load.totals)
    return message
