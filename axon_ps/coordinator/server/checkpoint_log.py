"""A coordinator's knowledge of its job's checkpoints: the newest one, the newest failure, and those under way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from axon_ps.wire.events import CheckpointReply, CheckpointStatus


class CheckpointLog:
    """The newest checkpoint and the newest failure.

    Args:
        now: the time, in seconds.
        happened: gets the kind and the text of events, for the history.

    Attributes:
        next: returns a text about the next automatic checkpoint.
    """

    def __init__(self, now: Callable[[], float], happened: Callable[[str, str], None]) -> None:
        self._now = now
        self._happened = happened
        self._newest = CheckpointStatus()
        self._newest_s = 0.0
        self._failure_s = 0.0
        self._activity = ""
        self.next: Callable[[], str] = str

    def status(self) -> CheckpointStatus:
        """Return the present status of checkpoints."""
        newest, now = self._newest, self._now()
        return dataclasses.replace(
            newest,
            age_s=now - self._newest_s if newest.uri else 0.0,
            failure_age_s=now - self._failure_s if newest.failure else 0.0,
            activity=self._activity or self.next(),
        )

    def written(self, info: CheckpointReply, took_s: float, age_s: float = 0.0) -> None:
        """Note a complete checkpoint. `took_s` is 0 if it was written before this coordinator started."""
        self._newest_s = self._now() - age_s
        self._newest = dataclasses.replace(
            self._newest, uri=info.uri, version=info.version, bytes=info.bytes, took_s=took_s
        )
        if took_s:
            self._happened("saved", f"version {info.version} is saved at {info.uri}, in {took_s:.3g} s")

    def failed(self, why: str) -> None:
        """Note a checkpoint that could not be written, verified, removed or restored."""
        self._failure_s = self._now()
        self._newest = dataclasses.replace(self._newest, failure=why)
        self._happened("checkpoint failed", why)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show an activity in the status while the context lasts."""
        before, self._activity = self._activity, what
        try:
            yield
        finally:
            self._activity = before
