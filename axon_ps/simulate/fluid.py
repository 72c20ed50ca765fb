"""Virtual time in which activities share resources: lines, loops, processors. No I/O.

Every activity moves at a rate that is bounded by the resources it uses, as water by pipes; when one begins or ends the
rates of all are found anew. The rates are max-min fair: all grow together until a resource is used up, those that use
it stay, the others grow on (Bertsekas & Gallager, Data Networks, 6.5.2; Casanova et al. 2014, SimGrid,
https://doi.org/10.1016/j.jpdc.2014.06.008, which found such models of TCP within some percent of packets).

Owns: rates and the ends of activities. Refuses: to know what they are.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

Process: TypeAlias = Generator[simpy.Event, Any, Any]

_REST = 1e-9
"""So much of an activity counts as nothing: what rounding leaves."""


@dataclass(eq=False)
class Resource:
    """Something that has so much to give a second.

    Attributes:
        name: for people.
        capacity: in the unit of what uses it, a second; infinite = never short.
    """

    name: str
    capacity: float


@dataclass(eq=False)
class _Activity:
    uses: Mapping[Resource, float]  # by unit of it
    most: float  # rate
    weight: float
    left: float
    done: simpy.Event
    rate: float = field(default=0.0)


class Fluid:
    """Activities in the virtual time of `env`.

    Args:
        env: simpy's environment.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._active: list[_Activity] = []
        self._since_s = 0.0
        self._alarm = 0  # of the last change: alarms of those before are void
        self._stale = False

    def run(
        self, amount: float, uses: Mapping[Resource, float], *, most: float = math.inf, weight: float = 1.0
    ) -> simpy.Event:
        """Begin an activity; the event is its end.

        Args:
            amount: of it, in units.
            uses: how much of a resource a unit takes.
            most: units a second that it makes at most, whatever there is.
            weight: how fast it grows beside others that share a resource with it.
        """
        done = self.env.event()
        if amount <= 0.0:
            return done.succeed()
        assert most < math.inf or any(r.capacity < math.inf for r in uses), "an activity that nothing bounds"
        self._advance()
        self._active.append(_Activity(uses, most, weight, amount, done))
        self._change()
        return done

    def _change(self) -> None:
        """Find the rates anew, once for all that begins and ends at this moment."""
        if not self._stale:
            self._stale = True
            self.env.timeout(0.0).callbacks.append(self._settle)

    def _advance(self) -> None:
        passed_s, self._since_s = self.env.now - self._since_s, self.env.now
        if passed_s:
            for activity in self._active:
                activity.left -= activity.rate * passed_s

    def _settle(self, _: simpy.Event) -> None:
        self._advance()
        self._stale = False
        self._end()
        share(self._active)
        if self._active:
            self._alarm += 1
            alarm = self.env.timeout(max(0.0, min(a.left / a.rate for a in self._active)), self._alarm)
            alarm.callbacks.append(self._at_alarm)

    def _at_alarm(self, alarm: simpy.Event) -> None:
        if alarm.value == self._alarm:
            self._advance()
            self._change()

    def _end(self) -> None:
        ended = [a for a in self._active if a.left <= _REST * max(1.0, a.rate)]
        if ended:
            self._active = [a for a in self._active if a not in ended]
            for activity in ended:
                activity.done.succeed()


def share(activities: list[_Activity]) -> None:
    """Give each its max-min fair rate."""
    room = {resource: resource.capacity for activity in activities for resource in activity.uses}
    growing = set(activities)
    level = 0.0
    while growing:
        demand = dict.fromkeys(room, 0.0)
        for activity in growing:
            for resource, by_unit in activity.uses.items():
                demand[resource] += activity.weight * by_unit
        full = {r: room[r] / d for r, d in demand.items() if d > 0.0}
        step = min(
            min(full.values(), default=math.inf),
            min(activity.most / activity.weight - level for activity in growing),
        )
        level += step
        for resource, by_level in demand.items():
            room[resource] -= by_level * step
        used_up = {r for r, most in full.items() if most <= step * (1 + 1e-12)}
        stay = [a for a in growing if a.most / a.weight <= level * (1 + 1e-12) or not used_up.isdisjoint(a.uses)]
        for activity in stay:
            activity.rate = activity.weight * level
        growing.difference_update(stay)
