"""The progress that a training script reports: written by `World.report`, shown by `axon-ps status`.

It is one small value in the job's key-value store, updated by the main process. At most one message is in flight, and
at most one is sent per second, besides the last step's. So a report after every step does not delay the steps.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.wire.report import REPORT_KEY

KEY: Final = REPORT_KEY
INTERVAL_S: Final = 1.0
_MAX_VALUES = 32

_logger = logging.getLogger(__name__)


class ProgressReporter:
    """The reports of a job's progress from this process.

    Args:
        send: starts storing a value under `KEY`; returns a future of it.
        clock: returns monotonic seconds.
    """

    def __init__(self, send: Callable[[bytes], Future[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._sent_s = -math.inf
        self._sending: Future[None] | None = None
        self._before: tuple[float, int] | None = None  # the time and step of the last report
        self._steps_per_s = 0.0

    def report(
        self, step: int, steps: int | None, loss: float | None, values: Mapping[str, float], *, by_version: bool = False
    ) -> None:
        """Send a report, unless one is still in flight or was sent within the last second.

        The last step is also sent within that second.

        Args:
            step: the number of steps made.
            steps: the number of steps planned; None = unknown.
            loss: the loss.
            values: further numbers.
            by_version: True if `step` is the version, since the script has given none.

        Raises:
            InvalidRequest: a value is not a number, or there are too many.
        """
        report = {"step": step, "steps": steps, "loss": loss}
        if len(values) > _MAX_VALUES:
            raise InvalidRequest(f"report was given {len(values)} values; at most {_MAX_VALUES} are kept")
        try:
            numbers = {name: float(value) for name, value in values.items()}
            report = {k: None if v is None else float(v) if k == "loss" else int(v) for k, v in report.items()}
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"report takes numbers: {error}") from error
        now_s = self._clock()
        if now_s - self._sent_s < INTERVAL_S and step != steps:
            return
        if self._sending is not None and not self._sending.done():
            return
        self._count(now_s, step)
        self._sent_s = now_s
        message = {**report, "steps_per_s": self._steps_per_s, "values": numbers, "at": time.time()}
        if by_version:
            message["by_version"] = True
        self._sending = self._send(json.dumps(message).encode())
        self._sending.add_done_callback(_log_failure)

    def _count(self, now_s: float, step: int) -> None:
        """Update the steps per second since the last report, and start over after an earlier step."""
        if self._before is not None and step > self._before[1] and now_s > self._before[0]:
            self._steps_per_s = (step - self._before[1]) / (now_s - self._before[0])
        if self._before is None or step != self._before[1]:
            self._before = (now_s, step)


def _log_failure(sent: Future[None]) -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        _logger.debug("the job's progress was not stored: %s", error)
