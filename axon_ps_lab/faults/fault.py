"""`Fault`: the faults of campaigns, of the grid, of the soak and of proxies, by one name each, and their traits.

A new kind of fault is a member of `Fault` and its row of `TRAITS`; `driver` strikes by it. No other module lists all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

ROLES: Final = ("coordinator", "shard", "worker")


class Fault(Enum):
    """A kind of fault; its value is its name in the file of a campaign."""

    KILL = "kill"  # SIGKILL; a successor is started
    FREEZE = "freeze"  # SIGSTOP for a while
    RESET = "reset"  # all connections of a process are closed on both sides with a TCP reset
    RESETS = "resets"  # existing and new connections of a process are reset, for a while
    HALF_CLOSE = "half_close"  # the client's direction ends (FIN); the server's goes on until the server ends it
    BLACK_HOLE = "black_hole"  # nothing that a process sends or is sent arrives for a while, then all of it
    DELAY = "delay"  # everything that a process sends or is sent arrives this much later, for a while
    SLOW_LINK = "slow_link"  # a limit of bytes a second, in each direction of a connection, for a while
    PARTITION = "partition"  # some members cannot reach the others for a while
    CUT = "cut"  # two members cannot reach each other for a while, though all others reach both
    FULL_DISK = "full_disk"  # the disk of the coordinator's state, or of the checkpoints, is full for a while
    CLOCK_JUMP = "clock_jump"  # a process's wall clock jumps, and back when the fault is over
    BIT_FLIP = "bit_flip"  # a bit in a shard server's memory
    TRUNCATED_FILE = "truncated_file"  # a file of the newest checkpoint is cut, and the checkpoint is restored
    KILL_TOGETHER = "kill_together"  # SIGKILL of the coordinator and a shard server at once; successors are started
    FAILING_DISK = "failing_disk"  # the coordinator's state cannot be written, so that it ends; a successor is started
    OLDER_STATE = "older_state"  # the coordinator is killed, and comes back with an earlier copy of its state
    TRUNCATED_JOURNAL = "truncated_journal"  # the coordinator is killed, and the end of its state is lost

    @property
    def traits(self) -> Traits:
        """Its row of `TRAITS`."""
        return TRAITS[self]


class Means(Enum):
    """The means by which a fault strikes."""

    KILL = "kill"  # processes get SIGKILL
    STATE = "state"  # the coordinator ends, and its state on disk fails or changes
    SIGNALS = "signals"  # processes get other signals for a while
    WIRE = "wire"  # connections of processes are disturbed
    CAMPAIGN = "campaign"  # disks, clocks, memory or checkpoints, which only campaigns of chaos reach


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of a kind of fault.

    Attributes:
        means: the means by which it strikes.
        roles: the roles that it can strike in a campaign; empty = no campaign has it. A full disk is that of the
            coordinator's state, or of the shard servers' checkpoints. A truncated file is the manifest, which the
            coordinator reads, or a file that a shard server wrote.
        lasts: it has a duration.
        silences: a worker that is struck for longer than its lease stops being a member.
        ends_coordinator: it always ends the coordinator; it does not strike from a campaign's `spared_from` on.
        from_outside: it can strike a job that the campaign has not started.
    """

    means: Means
    roles: tuple[str, ...] = ()
    lasts: bool = False
    silences: bool = False
    ends_coordinator: bool = False
    from_outside: bool = False

    @property
    def ends(self) -> bool:
        """True if the struck processes end."""
        return self.means in (Means.KILL, Means.STATE)


_COORDINATOR: Final = ("coordinator",)
_SERVICES: Final = ("coordinator", "shard")
_MEMBERS: Final = ("shard", "worker")

TRAITS: Final[Mapping[Fault, Traits]] = {
    Fault.KILL: Traits(means=Means.KILL, roles=ROLES, from_outside=True),
    Fault.FREEZE: Traits(means=Means.SIGNALS, roles=ROLES, lasts=True, silences=True, from_outside=True),
    Fault.RESET: Traits(means=Means.WIRE, roles=ROLES),
    Fault.RESETS: Traits(means=Means.WIRE, lasts=True),
    Fault.HALF_CLOSE: Traits(means=Means.WIRE),
    Fault.BLACK_HOLE: Traits(means=Means.WIRE, roles=ROLES, lasts=True, silences=True),
    Fault.DELAY: Traits(means=Means.WIRE, roles=ROLES, lasts=True),
    Fault.SLOW_LINK: Traits(means=Means.WIRE, roles=ROLES, lasts=True),
    Fault.PARTITION: Traits(means=Means.WIRE, roles=_MEMBERS, lasts=True, silences=True),
    Fault.CUT: Traits(means=Means.WIRE, roles=_MEMBERS, lasts=True, silences=True),
    Fault.FULL_DISK: Traits(means=Means.CAMPAIGN, roles=_SERVICES, lasts=True),
    Fault.CLOCK_JUMP: Traits(means=Means.CAMPAIGN, roles=ROLES, lasts=True),
    Fault.BIT_FLIP: Traits(means=Means.CAMPAIGN, roles=("shard",)),
    Fault.TRUNCATED_FILE: Traits(means=Means.CAMPAIGN, roles=_SERVICES, from_outside=True),
    Fault.KILL_TOGETHER: Traits(means=Means.KILL, roles=("shard",), ends_coordinator=True),
    Fault.FAILING_DISK: Traits(means=Means.STATE, roles=_COORDINATOR, ends_coordinator=True),
    Fault.OLDER_STATE: Traits(means=Means.STATE, roles=_COORDINATOR, lasts=True, ends_coordinator=True),
    Fault.TRUNCATED_JOURNAL: Traits(means=Means.STATE, roles=_COORDINATOR, ends_coordinator=True),
}
