"""Virtual time in which activities share resources: lines, loops, processors. It does no I/O.

The rate of every activity is bounded by the resources that it uses. When an activity begins or ends, all rates are
computed anew. The rates are max-min fair: all grow together until a resource is used up; then the rates of its users
stay, and the others grow on (Bertsekas & Gallager, Data Networks, 6.5.2). Such models of TCP are within some percent of
simulations of packets (Casanova et al. 2014, SimGrid, https://doi.org/10.1016/j.jpdc.2014.06.008).

Owns: rates and the ends of activities. Refuses: knowledge of what the activities are.
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
"""Seconds of work that may be left when an activity ends, because of rounding."""
_ROUNDING = 1 + 1e-12


@dataclass(eq=False)
class Resource:
    """A resource with a capacity per second.

    Attributes:
        name: its name, for messages.
        capacity: its capacity a second, in the unit of its users; infinite = never short.
        used: the amount used until now.
    """

    name: str
    capacity: float
    used: float = 0.0


@dataclass(eq=False)
class _Activity:
    uses: Mapping[Resource, float]  # amounts of resources for one unit of the activity
    most: float  # the highest rate
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
        self._alarm = 0  # number of the last alarm; older ones are void
        self._stale = False

    def run(
        self, amount: float, uses: Mapping[Resource, float], *, most: float = math.inf, weight: float = 1.0
    ) -> simpy.Event:
        """Begin an activity; returns the event of its end.

        Args:
            amount: amount of the activity, in units.
            uses: amounts of resources that a unit takes.
            most: the highest rate, in units a second, whatever the resources allow.
            weight: its growth, relative to other activities that share a resource with it.
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
        """Compute the rates anew, once for all activities that begin or end at this moment."""
        if not self._stale:
            self._stale = True
            self.env.timeout(0.0).callbacks.append(self._settle)

    def advance(self) -> None:
        """Count the work done and the resources used until now."""
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
        least_s = max(_REST, 4 * math.ulp(self.env.now))  # with less, time would not advance
        ended = [a for a in self._active if a.left <= least_s * max(1.0, a.rate)]
        if ended:
            self._active = [a for a in self._active if a not in ended]
            for activity in ended:
                activity.done.succeed()


def fair_rates(wanted: Sequence[Wanted]) -> list[float]:
    """Return the max-min fair rate of each activity.

    Args:
        wanted: for each activity, the resources that a unit uses, its highest rate and its weight.
    """
    free = {resource: resource.capacity for uses, _, _ in wanted for resource in uses}
    rates = [0.0] * len(wanted)
    growing = set(range(len(wanted)))
    level = 0.0
    while growing:
        demand = dict.fromkeys(free, 0.0)
        for i in growing:
            uses, _, weight = wanted[i]
            for resource, by_unit in uses.items():
                demand[resource] += weight * by_unit
        full = {resource: free[resource] / by_level for resource, by_level in demand.items() if by_level > 0.0}
        bounded = min(wanted[i][1] / wanted[i][2] for i in growing) - level
        step = min(bounded, min(full.values(), default=math.inf))
        level += step
        for resource, by_level in demand.items():
            free[resource] = max(0.0, free[resource] - by_level * step)
        used_up = {resource for resource, most in full.items() if most <= step * _ROUNDING}
        for i in list(growing):
            uses, most, weight = wanted[i]
            if most / weight <= level * _ROUNDING or not used_up.isdisjoint(uses):
                rates[i] = weight * level
                growing.remove(i)
    return rates
