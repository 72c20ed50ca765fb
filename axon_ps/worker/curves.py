"""The curves of a job: its script's reports, passed to loggers by the main process, once per committed version.

Each logger has a bounded queue and a thread, so that no step is delayed by a file or the network.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from axon_ps.errors import InvalidRequest
from axon_ps.observe.loggers.base import Logger

CAPACITY: Final = 4096
"""Steps that a logger may be behind. Further ones are not logged."""

CLOSE_S: Final = 10.0
"""Seconds that `close` waits for a logger that is behind."""

_LOG_AGAIN_S: Final = 60.0
_logger = logging.getLogger(__name__)


class LoggerQueue:
    """The queue of one logger, which passes each committed step on once.

    A step that is reported again at the same version, because its successor was aborted, is not logged twice. A step
    below the newest one is logged again, since the job was restored from a checkpoint.

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
        """Log the rest of the queue, then close the logger. A logger that is too slow is abandoned, with a warning."""
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


@dataclass
class _Target:
    make: Callable[[], Logger]
    hyperparams: Mapping[str, Any]
    statistics: bool
    queue: LoggerQueue | None = None


class CurveLoggers:
    """Loggers, which are made once this process is the main one.

    Args:
        statistics: the counters of this worker.
    """

    def __init__(self, statistics: Callable[[], Mapping[str, float]]) -> None:
        self._statistics = statistics
        self._targets: list[_Target] = []

    def add(
        self, make: Callable[[], Logger], hyperparams: Mapping[str, Any], *, statistics: bool, is_main: bool
    ) -> None:
        """Log to the logger that `make` returns, from now on.

        Raises:
            InvalidRequest: it does not return a logger.
        """
        target = _Target(make, dict(hyperparams), statistics)
        if is_main:
            target.queue = _made(target)
        self._targets.append(target)

    def log(self, loss: float | None, values: Mapping[str, float], version: Callable[[], int]) -> None:
        """Log values at the committed version of the first model. Only the main process calls it."""
        metrics = {name: float(value) for name, value in values.items()}
        if loss is not None:
            metrics["loss"] = float(loss)
        for target in self._targets:
            target.queue = target.queue or _made(target)
            counters = {f"worker/{k}": v for k, v in self._statistics().items()} if target.statistics else {}
            target.queue.log(metrics | counters, version())

    def close(self) -> None:
        """Log the queued values and close the loggers, within a limited time for each."""
        targets, self._targets = self._targets, []
        for target in targets:
            if target.queue is not None:
                target.queue.close()


def _made(target: _Target) -> LoggerQueue:
    logger = target.make()
    if not isinstance(logger, Logger):
        raise InvalidRequest(
            f"log_to was given a function that returns {type(logger).__name__}; a logger has log_metrics(metrics, "
            "step), log_hyperparams(params) and close()"
        )
    return LoggerQueue(logger, target.hyperparams)
