"""What a training script says of how far it is, for whoever watches the job: `World.report` and `axon-ps status`.

One small value in the job's key-value store, which its main process renews. Never more than one message is under way,
and none sooner than a second after the last: reporting after every step costs a step nothing.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from axon_ps.errors import AxonError, InvalidRequest

KEY: Final = "axon_ps/progress"
EVERY_S: Final = 1.0
_MOST_VALUES = 32

_logger = logging.getLogger(__name__)


class Progress:
    """This worker's word on how far the job is.

    Args:
        send: starts storing a value under `KEY`; a future of it.
        clock: seconds that only grow.
    """

    def __init__(self, send: Callable[[bytes], Future[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._sent_s = -math.inf
        self._sending: Future[None] | None = None
        self._before: tuple[float, int] | None = None  # a moment, and the step then
        self._steps_per_s = 0.0

    def report(self, step: int, steps: int | None, loss: float | None, values: Mapping[str, float]) -> None:
        """Take what is said; it is sent unless something was a moment ago. The last step always is.

        Raises:
            InvalidRequest: something is no number, or there are too many.
        """
        said = {"step": step, "steps": steps, "loss": loss}
        if len(values) > _MOST_VALUES:
            raise InvalidRequest(f"report was given {len(values)} values; at most {_MOST_VALUES} are kept")
        try:
            numbers = {name: float(value) for name, value in values.items()}
            said = {k: None if v is None else float(v) if k == "loss" else int(v) for k, v in said.items()}
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"report takes numbers: {error}") from error
        now_s = self._clock()
        if now_s - self._sent_s < EVERY_S and step != steps:
            return
        if self._sending is not None and not self._sending.done():
            return
        self._count(now_s, step)
        self._sent_s = now_s
        message = {**said, "steps_per_s": self._steps_per_s, "values": numbers, "at": time.time()}
        self._sending = self._send(json.dumps(message).encode())
        self._sending.add_done_callback(_look_at)

    def _count(self, now_s: float, step: int) -> None:
        """Steps a second since the last report; after a step that lies before it, anew."""
        if self._before is not None and step > self._before[1] and now_s > self._before[0]:
            self._steps_per_s = (step - self._before[1]) / (now_s - self._before[0])
        if self._before is None or step != self._before[1]:
            self._before = (now_s, step)


def _look_at(sent: Future[None]) -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        _logger.debug("the job's progress was not stored: %s", error)


async def progress_of(get: Callable[[str], Awaitable[bytes | None]]) -> dict[str, Any] | None:
    """What was reported last; None when nothing was.

    Args:
        get: the value of a key of the job's store.
    """
    try:
        said = await get(KEY)
        found = None if said is None else json.loads(said)
    except (AxonError, ValueError) as error:
        _logger.debug("the job's progress is not known: %s", error)
        return None
    return found if isinstance(found, dict) else None
