"""A clock for tests: its time changes only by `advance`."""

from __future__ import annotations

from axon_ps.errors import InvalidRequest


class ManualClock:
    """Seconds since an arbitrary moment. Call it to read the time, in place of `time.monotonic`.

    Args:
        now_s: its first time.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Advance the time; returns the new time.

        Raises:
            InvalidRequest: the time would go backwards.
        """
        if not seconds >= 0:
            raise InvalidRequest(f"a clock was told to advance by {seconds} s; time does not run backwards")
        self._now_s += seconds
        return self._now_s
