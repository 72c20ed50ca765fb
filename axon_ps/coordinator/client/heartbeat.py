"""A member's heartbeat (measurements, logs, the members that it reaches), and a warning when heartbeats are late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from axon_ps.coordinator.messages import connectivity_to_proto, logged_to_proto
from axon_ps.observe.log_buffer import LogBuffer
from axon_ps.wire.events import Connectivity
from axon_ps.wire.v1 import membership_pb2, session_pb2

LATE_S: Final = 1.0
"""A loop that wakes this much too late logs a warning: after a lease without a heartbeat the member is lost."""

MEASURE_S: Final = 1.0
"""Most seconds between two heartbeats with measurements, also while other messages are sent."""

_logger = logging.getLogger(__name__)


def heartbeat(
    measure: Callable[[], Mapping[str, float]], log: LogBuffer | None, connectivity: Connectivity | None = None
) -> session_pb2.SessionRequest:
    """Return a heartbeat.

    Args:
        measure: returns the member's measurements, by name.
        log: the log of its process; None = another member of the process sends it.
        connectivity: its report of the members that it reaches; None = no report.
    """
    try:
        measured = dict(measure())
    except Exception as error:  # a failed measurement must not end the membership
        _logger.debug("measuring for a heartbeat failed: %r", error)
        measured = {}
    records, dropped = ([], 0) if log is None else log.take()
    beat = membership_pb2.Heartbeat(
        metrics=measured,
        logs=logged_to_proto(records),
        logs_dropped=dropped,
        connectivity=None if connectivity is None else connectivity_to_proto(connectivity),
    )
    return session_pb2.SessionRequest(heartbeat=beat)


def interval_s(lease_s: float) -> float:
    """Return the time between two heartbeats of a member whose lease is `lease_s` long: a third of it, or less."""
    return min(lease_s / 3, MEASURE_S)


class Punctuality:
    """Logs that an event loop sends its heartbeats late. It is used in the loop's thread."""

    def __init__(self) -> None:
        self._waited_s = _not_scheduled_s()

    def sent(self) -> None:
        """Note that a heartbeat was sent."""
        self._waited_s = _not_scheduled_s()

    @contextmanager
    def expected(self, pause_s: float) -> Iterator[None]:
        """Return a context that is expected to take `pause_s` at most."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            late_s = time.monotonic() - began_s - pause_s
            if late_s >= LATE_S:
                _logger.warning(lateness(late_s, _not_scheduled_s() - self._waited_s))


def lateness(late_s: float, waited_s: float) -> str:
    """Return a warning that heartbeats come late, with the probable cause.

    Args:
        late_s: the delay.
        waited_s: seconds for which its thread was ready to run meanwhile and had no processor.
    """
    if waited_s >= late_s / 2:
        why = f"its processors were busy with others for {waited_s:.1f} s: give it more of them, or a higher priority"
    else:
        why = "this process was busy with something else, or was stopped"
    return f"heartbeats come {late_s:.1f} s late; {why}"


def _not_scheduled_s() -> float:
    """Return the seconds for which this thread was ready to run, and did not; 0 if the system does not report it."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
