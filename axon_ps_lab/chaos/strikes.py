"""`Strikes`: the faults of a campaign, as they strike the processes of its own job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from axon_ps.errors import AxonError, InvalidRequest
from axon_ps.host.children import Child
from axon_ps.observe.moments import Moment
from axon_ps_lab.chaos import disks
from axon_ps_lab.chaos.checkpoints import truncated
from axon_ps_lab.chaos.observer import Observer
from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.faults import FaultyCluster, Hit, bit_flips, state_files
from axon_ps_lab.faults.driver import Driver, Release, nothing_stopped
from axon_ps_lab.faults.fault import Fault, Means

_MOMENT_S: Final = 0.7
_RESTORE_S: Final = 15.0
_FLIP_S: Final = 10.0
_POLL_S: Final = 0.03


class Strikes:
    """Strikes a job of this machine.

    Args:
        cluster: its services.
        observer: observer of its coordinator's feed.
        process: finds a process by role and number.
        folders: the folders that a full disk fills, by role.
        checkpoints: the folder of its checkpoints.
        flips: the folder in which shard servers take orders to change their memory.

    Attributes:
        killed: incarnations of shard servers that were killed.
    """

    def __init__(
        self,
        cluster: FaultyCluster,
        observer: Observer,
        process: Callable[[str, int], Child],
        *,
        folders: Mapping[str, Path],
        checkpoints: Path,
        flips: Path,
    ) -> None:
        self._cluster, self._observer, self._process = cluster, observer, process
        self._folders, self._checkpoints, self._flips = folders, checkpoints, flips
        self._driver = Driver(cluster)
        self.killed: set[str] = set()

    def deal(self, fault: PlannedFault) -> tuple[str, float, str]:
        """Inject a fault, and return when it is over.

        Returns:
            The name of the process that was struck, the time at which the fault began, and a note for the report.
        """
        process = self._process(fault.role, fault.index)
        hit = self._moment(fault, process)
        release = nothing_stopped if hit is None else hit.release
        began = time.monotonic()
        try:
            note = self._strike(fault, process, release)
        finally:
            release()
        return f"{process.name} ({process.pid})", began, note

    def _moment(self, fault: PlannedFault, process: Child) -> Hit | None:
        """Wait until a process stops at the fault's moment; None = the fault has no moment, or no process stopped."""
        if not fault.moment:
            time.sleep(fault.after_s)
            return None
        moment = Moment[fault.moment]
        stopping = process if fault.role == "worker" else self._process("worker", fault.index)
        if moment is Moment.DECISION:
            stopping = self._process("coordinator", 0)
        return self._driver.stop_at(stopping, moment, _MOMENT_S)

    def _strike(self, fault: PlannedFault, process: Child, release: Release) -> str:
        kind = fault.kind
        if kind.traits.ends:
            return self._end(fault, process, release)
        if kind.traits.means is not Means.CAMPAIGN:
            side = [self._process(*member) for member in fault.side]
            struck = side if kind is Fault.PARTITION else [process]
            other = side[0] if kind is Fault.CUT else None
            rate = fault.amount
            self._driver.last(kind, struck, fault.seconds, release=release, bytes_per_s=rate, other=other)
            return ""
        if kind is Fault.FULL_DISK:
            return self._fill_disk(fault, release)
        if kind is Fault.CLOCK_JUMP:
            slot = self._cluster.slot_of(process)
            self._cluster.clocks.jump(slot, fault.amount)
            release()
            time.sleep(fault.seconds)
            self._cluster.clocks.jump(slot, 0.0)
            return ""
        if kind is Fault.TRUNCATED_FILE:
            release()
            return truncated(str(self._checkpoints), fault, lambda uri: self._observer.restore(uri, _RESTORE_S))
        if kind is Fault.BIT_FLIP:
            return self._flip(fault, process, release)
        raise InvalidRequest(f"a campaign cannot strike by {kind.value}; add it to `Strikes`")

    def _end(self, fault: PlannedFault, process: Child, release: Release) -> str:
        """End processes, and restart the services among them with the remains of their state."""
        if fault.role == "shard" and (status := self._observer.status()) is not None:
            self.killed.update(m.incarnation for m in status.membership.shards if m.rank == fault.index)
        ended = [] if fault.role == "worker" else [(fault.role, fault.index)]
        struck, older = [process], None
        if fault.kind is Fault.KILL_TOGETHER:
            ended.insert(0, ("coordinator", 0))
            struck.append(self._process("coordinator", 0))
        elif fault.kind is Fault.OLDER_STATE:
            older = state_files.copy(process, self._cluster.state)
            release()
            time.sleep(fault.seconds)
        try:
            note = self._driver.end(fault.kind, struck, release=release, older=older, seed=fault.seed)
        except AxonError as error:
            return f"WRONG: {error}"
        for role, index in ended:
            self._cluster.restart(role, index)
        return note

    def _fill_disk(self, fault: PlannedFault, release: Release) -> str:
        disk = self._folders[fault.role]
        filled = disks.fill(disk)
        try:
            release()
            time.sleep(fault.seconds)
        finally:
            disks.empty(disk)
        return f"{filled >> 10} KiB were free"

    def _flip(self, fault: PlannedFault, process: Child, release: Release) -> str:
        """Change a bit, and wait until the corruption is reported: a fault before that could remove the other copy."""
        before = len(self._observer.corruptions)
        flipped: bit_flips.Flip | None = None
        deadline = time.monotonic() + _FLIP_S
        while flipped is None and time.monotonic() < deadline:
            flipped = bit_flips.flip(self._flips, process.pid, fault.seed)
            release()
            time.sleep(0.0 if flipped else _POLL_S)
        if flipped is None:
            return "there was nothing that a commit reads"
        deadline = time.monotonic() + _FLIP_S
        while len(self._observer.corruptions) == before and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        what = f"bit {flipped.bit} of element {flipped.element} of {flipped.array}, slice {flipped.slice}"
        found = self._observer.corruptions[before:]
        right = len(found) == 1 and flipped.array in found[0] and f"slice {flipped.slice}," in found[0]
        return what if right else f"WRONG: {what}; the coordinator told {found or 'nothing'}"
