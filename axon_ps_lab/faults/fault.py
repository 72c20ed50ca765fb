"""`Fault`: the faults of campaigns, of the grid, of the soak and of proxies, by one name each."""

from __future__ import annotations

from enum import Enum


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


ON_THE_WIRE = frozenset(
    {
        *(Fault.RESET, Fault.RESETS, Fault.HALF_CLOSE, Fault.BLACK_HOLE, Fault.DELAY, Fault.SLOW_LINK),
        *(Fault.PARTITION, Fault.CUT),
    }
)
"""Faults of connections."""

OF_THE_STATE = frozenset({Fault.FAILING_DISK, Fault.OLDER_STATE, Fault.TRUNCATED_JOURNAL})
"""Faults of the coordinator's state on disk, each of which ends the coordinator."""
