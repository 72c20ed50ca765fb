"""What a heartbeat of a member carries: what it measures, and what it has logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from axon_ps.coordinator.messages import logged_to_proto
from axon_ps.observe.log_buffer import LogBuffer
from axon_ps.wire.v1 import membership_pb2, session_pb2

_logger = logging.getLogger(__name__)


def heartbeat(measure: Callable[[], Mapping[str, float]], log: LogBuffer | None) -> session_pb2.SessionRequest:
    """A heartbeat.

    Args:
        measure: returns what the member measures, by name.
        log: what its process logs; None = another member of the process sends it.
    """
    try:
        measured = dict(measure())
    except Exception as error:  # a number that is missing costs nobody the membership
        _logger.debug("measuring for a heartbeat failed: %r", error)
        measured = {}
    records, dropped = ([], 0) if log is None else log.take()
    beat = membership_pb2.Heartbeat(metrics=measured, logs=logged_to_proto(records), logs_dropped=dropped)
    return session_pb2.SessionRequest(heartbeat=beat)
