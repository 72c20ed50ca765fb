"""A member's report of the members that it reaches, from its probes: see `coordinator.core.reachability`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from axon_ps.wire.events import Connectivity


class ConnectivityReport:
    """The newest findings of a process's probes, on one event loop.

    Args:
        lease_s: returns the seconds of silence that the coordinator tolerates.

    Attributes:
        changed: called when there is something to report.
    """

    def __init__(self, lease_s: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.changed: Callable[[], object] = lambda: None
        self._unreachable: dict[str, set[object]] = {}  # by incarnation, the probes that could not reach it
        self._reached: set[str] = set()
        self._sent: set[str] = set()  # those reported on the present stream

    def found(self, incarnation: str, by: object, *, reached: bool) -> None:
        """Note that some probes have reached a member, or could not reach it for long."""
        before = incarnation in self._unreachable, incarnation in self._reached
        if reached:
            self._reached.add(incarnation)
            self._forget(incarnation, by)
        else:
            self._unreachable.setdefault(incarnation, set()).add(by)
        if before != (incarnation in self._unreachable, incarnation in self._reached):
            self.changed()

    def retain(self, present: Collection[str], by: object) -> None:
        """Forget former members, for some probes. A member that comes back has to be reached anew."""
        for incarnation in list(self._unreachable):
            if incarnation not in present:
                self._forget(incarnation, by)
        self._reached.intersection_update(present)
        self._sent.intersection_update(present)

    def begin(self) -> Connectivity:
        """Return the first report on a new stream."""
        self._sent.clear()
        return self.take()

    def take(self) -> Connectivity:
        """Return all members that cannot be reached now, and the reached members that were not reported yet."""
        new = self._reached - self._sent
        self._sent |= new
        return Connectivity(unreachable=frozenset(self._unreachable), reached=frozenset(new))

    def _forget(self, incarnation: str, by: object) -> None:
        finders = self._unreachable.get(incarnation, set())
        finders.discard(by)
        if not finders:
            self._unreachable.pop(incarnation, None)
