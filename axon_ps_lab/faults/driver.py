"""`Driver`: strikes processes of a `FaultyCluster`; grid, soak and chaos choose processes, faults and moments."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from axon_ps.errors import AxonError, InvalidRequest
from axon_ps.host.children import Child
from axon_ps.observe.moments import Moment
from axon_ps_lab.faults import state_files
from axon_ps_lab.faults.cluster import FaultyCluster
from axon_ps_lab.faults.fault import Fault, Means
from axon_ps_lab.faults.injector import Hit
from axon_ps_lab.faults.proxy import Disturbance

END_S: Final = 60.0
"""The longest time that a process may take to end."""

Release = Callable[[], object]
"""Lets a process continue that stopped at its moment; it may be called again."""

Send = Callable[[int], object]
"""Sends a signal to a process."""


def nothing_stopped() -> None:
    """Release nothing."""


def send_signals(fault: Fault, to: Sequence[Send], seconds: float, release: Release = nothing_stopped) -> None:
    """Strike processes by signals for a while.

    Args:
        fault: FREEZE.
        to: sends a signal to each of the processes.
        seconds: its duration.
        release: called when the fault has begun.

    Raises:
        InvalidRequest: the fault is another one.
    """
    if fault is not Fault.FREEZE:
        raise InvalidRequest(f"{fault.value} is not a fault by signals; add its signals to `send_signals`")
    for send in to:
        send(signal.SIGSTOP)
    try:
        release()
        time.sleep(seconds)
    finally:
        for send in to:
            send(signal.SIGCONT)


class Driver:
    """Strikes processes of a cluster; a fault is over when the call returns.

    Args:
        cluster: the cluster, which runs.
    """

    def __init__(self, cluster: FaultyCluster) -> None:
        self._cluster = cluster

    def stop_at(self, process: Child, moment: Moment, timeout_s: float) -> Hit | None:
        """Wait until a process stops at a moment; None = it did not reach it in time, and goes on."""
        slot = self._cluster.slot_of(process)
        self._cluster.moments.arm(slot, moment)
        hit = self._cluster.moments.wait(timeout_s)
        self._cluster.moments.arm(slot, None)
        return hit

    def end(
        self,
        fault: Fault,
        struck: Sequence[Child],
        *,
        release: Release = nothing_stopped,
        older: Mapping[Path, bytes] | None = None,
        seed: int = 0,
    ) -> str:
        """End processes at once, and leave the coordinator's state as the fault does; they can be restarted then.

        Args:
            fault: KILL, KILL_TOGETHER, or a fault of the state.
            struck: the processes; the coordinator alone for a fault of the state.
            release: called when the fault has begun.
            older: OLDER_STATE: the state that the successor finds.
            seed: TRUNCATED_JOURNAL: seed of the journal's new length.

        Returns:
            A note for the report.

        Raises:
            InvalidRequest: the fault does not end processes.
            AxonError: a process runs on.
        """
        if not fault.traits.ends:
            raise InvalidRequest(f"{fault.value} does not end processes; call `last`")
        if fault is Fault.FAILING_DISK:
            for process in struck:
                state_files.cannot_write(process)
                process.was_signalled = True
            release()
        else:
            for process in struck:
                process.send_signal(signal.SIGKILL)
        running = [process.name for process in struck if process.wait(END_S) is None]
        release()
        if running:
            raise AxonError(f"{' and '.join(running)} runs on after {fault.value.replace('_', ' ')}")
        if fault is Fault.OLDER_STATE and older is not None:
            return state_files.put_back(older, self._cluster.state)
        if fault is Fault.TRUNCATED_JOURNAL:
            return state_files.cut_journal(self._cluster.state, seed)
        return ""

    def last(
        self,
        fault: Fault,
        struck: Sequence[Child],
        seconds: float,
        *,
        release: Release = nothing_stopped,
        bytes_per_s: float = 1e6,
        other: Child | None = None,
    ) -> None:
        """Send signals to processes, or disturb their connections, for a while.

        Args:
            fault: a fault by signals, or of connections.
            struck: the processes; PARTITION: those of one side.
            seconds: its duration.
            release: called when the fault has begun.
            bytes_per_s: SLOW_LINK: the rate.
            other: CUT: the process that they cannot reach.

        Raises:
            InvalidRequest: the fault is another one.
        """
        if fault.traits.means is Means.SIGNALS:
            send_signals(fault, [process.send_signal for process in struck], seconds, release)
            return
        if fault.traits.means is not Means.WIRE:
            raise InvalidRequest(
                f"{fault.value} is neither by signals nor of connections, so a driver cannot make it last"
            )
        kind = Fault.BLACK_HOLE if fault in (Fault.PARTITION, Fault.CUT) else fault
        what = Disturbance(kind=kind, seconds=seconds, bytes_per_s=bytes_per_s)
        if fault is Fault.PARTITION:
            self._cluster.partition(what, struck)
        else:
            for process in struck:
                if fault is Fault.CUT and other is not None:
                    self._cluster.cut(what, process, other)
                else:
                    self._cluster.disturb(what, process)
        release()
        time.sleep(what.heals_after_s)
