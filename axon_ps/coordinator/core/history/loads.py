"""What each member does: bytes, memory and CPU as it reports them, lag and slices as the coordinator sees them. Pure.

A member's heartbeat may have metrics. Those named below are understood; rates are taken of the totals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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

Place = tuple[Role, int]
"""Role and rank."""


@dataclass
class Load:
    """What is known of a member."""

    message: watch_pb2.MemberLoad
    totals: Mapping[str, float] = field(default_factory=dict)
    totals_s: float = 0.0


class Loads:
    """The members, and about which something is new since `take_new`."""

    def __init__(self) -> None:
        self._loads: dict[Place, Load] = {}
        self._new: set[Place] = set()
        self._measured: set[Place] = set()

    def measured(self, place: Place, metrics: Mapping[str, float], at_s: float) -> None:
        """A member has reported its metrics."""
        load = self._load(place)
        elapsed_s = at_s - load.totals_s
        if load.totals and elapsed_s > 0:
            for name, rate in _RATES.items():
                grown = metrics.get(name, 0.0) - load.totals.get(name, 0.0)
                setattr(load.message, rate, max(0.0, float(f"{grown / elapsed_s:.4g}")))
        load.message.memory_bytes = metrics.get(MEMORY_BYTES, 0.0)
        load.message.reported_s = at_s
        load.totals, load.totals_s = dict(metrics), at_s
        self._measured.add(place)

    def changed(self, place: Place, **values: float) -> None:
        """The coordinator has seen something of a member."""
        load = self._loads.get(place) or self._load(place)
        for name, value in values.items():
            if getattr(load.message, name) != value:
                setattr(load.message, name, value)
                self._new.add(place)

    def only(self, members: set[Place]) -> None:
        """These are the members now."""
        self._loads = {place: load for place, load in self._loads.items() if place in members}

    def bytes_per_s(self) -> float:
        """What all members send together."""
        return sum(load.message.sent_bytes_per_s for load in self._loads.values())

    def take_new(self) -> list[watch_pb2.MemberLoad]:
        """The members about which something is new since the last call of this."""
        new, self._new = self._new, set()
        measured, self._measured = self._measured, set()
        return [_message(load, with_metrics=p in measured) for p, load in self._loads.items() if p in new]

    def everything(self) -> list[watch_pb2.MemberLoad]:
        """All of them."""
        return [_message(load, with_metrics=True) for load in self._loads.values()]

    def _load(self, place: Place) -> Load:
        self._new.add(place)
        if place not in self._loads:
            role, rank = place
            self._loads[place] = Load(watch_pb2.MemberLoad(role=codec.role_to_proto(role), rank=rank))
        return self._loads[place]


def _message(load: Load, *, with_metrics: bool) -> watch_pb2.MemberLoad:
    message = watch_pb2.MemberLoad()
    message.CopyFrom(load.message)
    if with_metrics:
        message.metrics.update(load.totals)
    return message
