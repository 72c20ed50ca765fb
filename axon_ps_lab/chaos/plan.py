"""The faults of a campaign: a list that depends on the campaign's file and seed alone. It is pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from axon_ps_lab.chaos.campaign import Campaign, Embedded, Job, KindOptions
from axon_ps_lab.faults.fault import Fault

MOMENTS: Final = ("GATHER", "FORWARD", "BACKWARD", "PUSH", "VOTE", "BETWEEN_STEPS", "DECISION")

JITTER_S: Final = 0.08
"""The largest random delay of a fault that has no moment, in seconds."""

ProcessKey = tuple[str, int]
"""A role and a number: of a shard server its rank, of a worker its position by age, the oldest first."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault.

    Attributes:
        number: its number, from 1.
        kind: its kind.
        role: role of the process that it strikes.
        index: number of that process; see `ProcessKey`.
        seconds: its duration; 0 = it is over at once.
        amount: clock_jump: seconds; slow_link: bytes a second.
        side: partition: the members that cannot reach the others; cut: the second of the two members.
        moment: the moment of a step at which it strikes; empty = after `after_s`.
        after_s: seconds between the quiet time and the fault, if it has no moment.
        seed: seed of the choices that are made when it strikes.
    """

    number: int
    kind: Fault
    role: str
    index: int
    seconds: float = 0.0
    amount: float = 0.0
    side: tuple[ProcessKey, ...] = ()
    moment: str = ""
    after_s: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The fault as text."""
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        amount = {Fault.CLOCK_JUMP: f" by {self.amount:+g} s", Fault.SLOW_LINK: f" of {self.amount / 1e6:g} MB/s"}
        at = f" at {self.moment}" if self.moment else ""
        target = " + ".join(f"{role} {index}" for role, index in self.side or ((self.role, self.index),))
        return f"{self.kind.value.replace('_', ' ')}{amount.get(self.kind, '')} of {target}{lasting}{at}"


def planned(campaign: Campaign) -> list[PlannedFault]:
    """Return the faults of a campaign, in order."""
    chance = random.Random(campaign.seed)
    return [_fault(campaign, number, chance) for number in range(1, campaign.faults + 1)]


def _fault(campaign: Campaign, number: int, chance: random.Random) -> PlannedFault:
    target = campaign.target
    spares = isinstance(target, Embedded) and number > target.spared_from * campaign.faults
    kinds = [k for k in campaign.kinds if not (spares and k.traits.ends_coordinator)] or list(campaign.kinds)
    kind = chance.choices(kinds, [campaign.kinds[k].weight for k in kinds])[0]
    options = campaign.kinds[kind]
    seconds = chance.choice(options.seconds) if kind.traits.lasts else 0.0
    indices = _indices(target, kind, options, seconds, spares=spares)
    role = chance.choice(list(indices))
    index = chance.choice(indices[role])
    amount = {Fault.CLOCK_JUMP: chance.choice(options.jump_s), Fault.SLOW_LINK: options.bytes_per_s}.get(kind, 0.0)
    moment = chance.choice(MOMENTS) if chance.random() < campaign.moments and isinstance(target, Embedded) else ""
    side: tuple[ProcessKey, ...] = ()
    if kind is Fault.PARTITION and isinstance(target, Embedded):
        side = _side(target, (role, index), chance, spares=spares)
    if kind is Fault.CUT and isinstance(target, Embedded):
        side = (_other(target, (role, index), chance),)
    return PlannedFault(
        number=number,
        kind=kind,
        role=role,
        index=index,
        seconds=seconds,
        amount=amount,
        side=side,
        moment=moment,
        after_s=round(chance.uniform(0.0, JITTER_S), 3),
        seed=chance.getrandbits(31),
    )


def _indices(
    target: Embedded | Job, kind: Fault, options: KindOptions, seconds: float, *, spares: bool
) -> dict[str, range]:
    """Return by role the numbers of the processes that may be struck."""
    if isinstance(target, Job):  # the number of processes is determined when the fault strikes
        return dict.fromkeys(options.roles, range(64))
    counts = {"coordinator": 1, "shard": target.shards, "worker": target.workers}
    kills = kind.traits.ends and not kind.traits.ends_coordinator
    leaves = kind.traits.silences and seconds >= target.lease_s / 2
    spared = {role: spares and (kills or (role == "worker" and leaves)) for role in options.roles}
    found = {role: range(int(spared[role]), counts[role]) for role in options.roles}
    return {role: some for role, some in found.items() if some} or dict.fromkeys(options.roles, range(1))


def _side(target: Embedded, first: ProcessKey, chance: random.Random, *, spares: bool) -> tuple[ProcessKey, ...]:
    """Choose the members of the smaller side: fewer shard servers than a slice has copies, and no spared member."""
    members = [("worker", index) for index in range(1 if spares else 0, target.workers)]
    if first[0] == "worker" and target.replication > 1:
        members += [("shard", chance.randrange(target.shards))]
    others = [member for member in members if member != first and chance.random() < 0.5]
    return tuple(sorted({first, *others}))


def _other(target: Embedded, first: ProcessKey, chance: random.Random) -> ProcessKey:
    """Choose the other end of a cut: another shard server, or a worker if there is none."""
    others = [("shard", index) for index in range(target.shards) if ("shard", index) != first]
    return chance.choice(others or [("worker", index) for index in range(target.workers)])
