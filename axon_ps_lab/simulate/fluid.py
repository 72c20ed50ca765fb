"""Virtual time in which activities share resources: lines, loops, processors. No I/O.

Every activity moves at a rate that is bounded by the resources it uses, as water by pipes; when one begins or ends the
rates of all are found anew. The rates are max-min fair: all grow together until a resource is used up, those that use
it stay, the others grow on (Bertsekas & Gallager, Data Networks, 6.5.2; Casanova et al. 2014, SimGrid,
https://doi.org/10.1016/j.jpdc.2014.06.008, which found such models of TCP within some percent of packets).

Owns: rates and the ends of activities. Refuses: to know what they are.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

Process: TypeAlias = Generator[simpy.Event, Any, Any]
Wanted: TypeAlias = tuple[Mapping["Resource", float], float, float]

_REST = 1e-9
"""What would end within so many seconds has ended: rounding leaves that."""
_ROUNDING = 1 + 1e-12


@dataclass(eq=False)
class Resource:
    """Something that has so much to give a second.

    Attributes:
        name: for people.
        capacity: in the unit of what uses it, a second; infinite = never short.
        used: of it, until now.
    """

    name: str
    capacity: float
    used: float = 0.0


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
        self.advance()
        self._active.append(_Activity(uses, most, weight, amount, done))
        self._change()
        return done

    def _change(self) -> None:
        """Find the rates anew, once for all that begins and ends at this moment."""
        if not self._stale:
            self._stale = True
            self.env.timeout(0.0).callbacks.append(self._settle)

    def advance(self) -> None:
        """Count what was done, and used, until now."""
        elapsed_s, self._since_s = self.env.now - self._since_s, self.env.now
        if elapsed_s:
            for activity in self._active:
                done = activity.rate * elapsed_s
                activity.left -= done
                for resource, by_unit in activity.uses.items():
                    resource.used += by_unit * done

    def _settle(self, _: simpy.Event) -> None:
        self.advance()
        self._stale = False
        self._end()
        rates = fair_rates([(activity.uses, activity.most, activity.weight) for activity in self._active])
        for activity, rate in zip(self._active, rates, strict=True):
            activity.rate = rate
        if self._active:
            self._alarm += 1
            alarm = self.env.timeout(max(0.0, min(a.left / a.rate for a in self._active)), self._alarm)
            alarm.callbacks.append(self._at_alarm)

    def _at_alarm(self, alarm: simpy.Event) -> None:
        if alarm.value == self._alarm:
            self.advance()
            self._change()

    def _end(self) -> None:
        least_s = max(_REST, 4 * math.ulp(self.env.now))  # less, and time would stand still
        ended = [a for a in self._active if a.left <= least_s * max(1.0, a.rate)]
        if ended:
            self._active = [a for a in self._active if a not in ended]
            for activity in ended:
                activity.done.succeed()


def fair_rates(wanted: Sequence[Wanted]) -> list[float]:
    """The max-min fair rate of each activity.

    Args:
        wanted: what a unit of it uses, its highest rate and its weight.
    """
    room = {resource: resource.capacity for uses, _, _ in wanted for resource in uses}
    rates = [0.0] * len(wanted)
    growing = set(range(len(wanted)))
    level = 0.0
    while growing:
        demand = dict.fromkeys(room, 0.0)
        for i in growing:
            uses, _, weight = wanted[i]
            for resource, by_unit in uses.items():
                demand[resource] += weight * by_unit
        full = {resource: room[resource] / by_level for resource, by_level in demand.items() if by_level > 0.0}
        bounded = min(wanted[i][1] / wanted[i][2] for i in growing) - level
        step = min(bounded, min(full.values(), default=math.inf))
        level += step
        for resource, by_level in demand.items():
            room[resource] = max(0.0, room[resource] - by_level * step)
        used_up = {resource for resource, most in full.items() if most <= step * _ROUNDING}
        for i in list(growing):
            uses, most, weight = wanted[i]
            if most / weight <= level * _ROUNDING or not used_up.isdisjoint(uses):
                rates[i] = weight * level
                growing.remove(i)
    return rates
