"""A bounded queue of metrics for a logger, and its thread, so that training waits for no file or network."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from axon_ps.observe.loggers.base import Logger

CAPACITY: Final = 4096
CLOSE_S: Final = 10.0
"""Seconds that `close` waits for a logger that is behind."""

_LOG_AGAIN_S: Final = 60.0
_logger = logging.getLogger(__name__)


class LoggerQueue:
    """Gives each committed step to one logger, once.

    A step that is reported again at the same version, because its successor was aborted, is not logged twice. A step
    below the newest one is logged again: the job was restored from a checkpoint, and the logger handles that.

    Args:
        logger: gets all metrics, on the queue's thread; closed with the queue.
        hyperparams: the settings of the run, which it gets first.
    """

    def __init__(self, logger: Logger, hyperparams: Mapping[str, Any]) -> None:
        self._logger = logger
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(CAPACITY)
        self._newest: int | None = None
        self._warned_s = -_LOG_AGAIN_S
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="axon-ps logger", daemon=True)
        self._thread.start()
        if hyperparams:
            self._put(lambda: logger.log_hyperparams(dict(hyperparams)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log values at a committed version, unless it has been logged."""
        if step == self._newest:
            return
        self._newest = step
        values = dict(metrics)
        self._put(lambda: self._logger.log_metrics(values, step))

    def close(self) -> None:
        """Log the rest of the queue, then close the logger; a logger that is too slow is abandoned, with a warning."""
        ends = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            name = type(self._logger).__name__
            _logger.warning("%s has not taken %d values in %g s; they are lost", name, self._queue.qsize(), CLOSE_S)

    def _put(self, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._dropped += 1
            self._warn(f"is {CAPACITY} steps behind; {self._dropped} steps were not logged")

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            self._try(action)
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a logger may be the user's; training goes on
            self._warn(f"failed: {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _LOG_AGAIN_S:
            self._warned_s = now_s
            _logger.warning("the logger %s %s", type(self._logger).__name__, what)
