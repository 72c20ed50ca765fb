"""What reaches a logger, when and from whom; a logger that is slow or raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.observe.loggers.base import Logger
from axon_ps.worker import curves as queues
from axon_ps.worker.curves import CurveLoggers, LoggerQueue


class Recording:
    """A user's own logger."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.hyperparams: dict[str, Any] = {}
        self.closed = False

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.hyperparams = dict(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.points.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_a_version_is_logged_once_and_a_restored_one_again() -> None:
    logger = Recording()
    assert isinstance(logger, Logger)
    queue = LoggerQueue(logger, {"lr": 0.1})
    for step in (1, 2, 2, 3, 2, 3):  # the second 2 is a step that was aborted; then version 1 was restored
        queue.log({"loss": float(step)}, step)
    queue.close()
    assert [step for step, _ in logger.points] == [1, 2, 3, 2, 3]
    assert logger.hyperparams == {"lr": 0.1}
    assert logger.closed


def test_a_logger_that_raises_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recording):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            raise OSError("no space left")

    logger = Failing()
    with caplog.at_level(logging.WARNING):
        queue = LoggerQueue(logger, {})
        for step in range(5):
            queue.log({}, step)
        queue.close()
    assert logger.closed
    assert [r.getMessage() for r in caplog.records] == ["the logger Failing failed: OSError: no space left"]


def test_a_logger_that_does_not_move_costs_nobody_anything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Stuck(Recording):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            assert released.wait(60)

    monkeypatch.setattr(queues, "CAPACITY", 2)
    monkeypatch.setattr(queues, "CLOSE_S", 0.01)
    with caplog.at_level(logging.WARNING):
        queue = LoggerQueue(Stuck(), {})
        for step in range(9):
            queue.log({}, step)
        queue.close()
    messages = [r.getMessage() for r in caplog.records]
    assert any("steps were not logged" in m for m in messages)
    assert any("they are lost" in m for m in messages)
    released.set()
    queue._thread.join(0.05)


def test_only_who_is_main_has_a_logger() -> None:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording())
        return made[-1]

    curves = CurveLoggers(lambda: {"retries": 2.0})
    curves.add(make, {}, statistics=True, is_main=False)
    assert made == []
    curves.log(0.5, {"lr": 1}, lambda: 7)  # the main process died, and this one is it now
    curves.close()
    assert made[0].points == [(7, {"lr": 1.0, "loss": 0.5, "worker/retries": 2.0})]


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="log_metrics"):
        CurveLoggers(dict).add(lambda: object(), {}, statistics=False, is_main=True)  # type: ignore[arg-type, return-value]


def test_a_world_logs_what_is_reported() -> None:
    logger = Recording()
    with World.mock() as world:
        world.log_to(lambda: logger, hyperparams={"layers": 2})
        world.report(step=3, loss=0.25, lr=0.1)
    assert logger.closed
    assert logger.points == [(0, {"loss": 0.25, "lr": 0.1})]
