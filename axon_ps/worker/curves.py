"""The curves of a job: its script's reports, passed to loggers by the main process, once per committed version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from axon_ps.errors import InvalidRequest
from axon_ps.observe.loggers.base import Logger
from axon_ps.observe.loggers.queue import LoggerQueue


@dataclass
class _Target:
    make: Callable[[], Logger]
    hyperparams: Mapping[str, Any]
    statistics: bool
    queue: LoggerQueue | None = None


class Curves:
    """Loggers, made when this process is the main one: only one worker has them.

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
        """Log values at the committed version of the first model; only the main process calls it."""
        metrics = {name: float(value) for name, value in values.items()}
        if loss is not None:
            metrics["loss"] = float(loss)
        for target in self._targets:
            target.queue = target.queue or _made(target)
            counters = {f"worker/{k}": v for k, v in self._statistics().items()} if target.statistics else {}
            target.queue.log(metrics | counters, version())

    def close(self) -> None:
        """Log the queued values and close the loggers; waits for them for a limited time."""
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
