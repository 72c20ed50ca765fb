"""The lines that a coordinator logs about its job: memberships, steps that do not commit, checkpoints, stragglers."""

from __future__ import annotations

import logging
from typing import Final

from axon_ps.types import Decision, Membership, Outcome
from axon_ps.wire.events import UPLOADED, RestoreOrder, ServerEvent, SnapshotOrder

LOG_STRAGGLERS_AFTER_S: Final = 10.0
"""When workers have waited this long in a step for others, the others are logged."""

_logger = logging.getLogger(__name__)


class EventLog:
    """Logs events. Memberships and decisions are not logged again when they are repeated for one member."""

    def __init__(self) -> None:
        self._generation = 0
        self._steps: dict[int, int] = {}  # by model
        self._longest_wait_s = 0.0

    def published(self, event: ServerEvent) -> None:
        """Log an event."""
        if isinstance(event, Membership) and event.generation > self._generation:
            self._generation = event.generation
            members = f"{len(event.workers)} workers, {len(event.shards)} shard servers"
            waiting = "" if event.complete else f"; waiting for {event.waiting_for}"
            _logger.info("generation %d: %s%s", event.generation, members, waiting)
        elif isinstance(event, Decision) and event.step > self._steps.get(event.model, 0):
            self._steps[event.model] = event.step
            if event.outcome is not Outcome.COMMIT:
                # The loss of a member that aborts a step is logged elsewhere.
                level = logging.WARNING if event.outcome is Outcome.SKIP else logging.INFO
                of = f" of model {event.model}" if event.model else ""
                _logger.log(level, "step %d%s: %s: %s", event.step, of, event.outcome.value, event.reason)
        elif isinstance(event, SnapshotOrder):
            _logger.info("version %d is written to %s", event.version, event.uri)
        elif isinstance(event, RestoreOrder):
            by_worker = event.uri.startswith(UPLOADED)
            source = "what a worker uploads" if by_worker else event.uri
            _logger.warning("version %d is restored from %s", event.version, source)

    def waited(self, longest_s: float, text: str) -> None:
        """Log once the workers for which others have waited for `LOG_STRAGGLERS_AFTER_S`.

        Args:
            longest_s: the longest present wait.
            text: names those that are waited for.
        """
        before_s, self._longest_wait_s = self._longest_wait_s, longest_s
        if before_s < LOG_STRAGGLERS_AFTER_S <= longest_s:
            _logger.warning("%s", text)
