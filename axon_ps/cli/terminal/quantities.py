"""Bytes, times, work and curves as text, and times parsed from text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from axon_ps.errors import ConfigurationError
from axon_ps.observe.work import LongWork

_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
_DOING: Final = {
    "upload": "first values are uploaded",
    "snapshot": "a checkpoint is written",
    "restore": "a checkpoint is restored",
    "copy": "slices are copied",
}
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    """Format bytes in powers of 1000, with three digits: "1.23 MB"."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format seconds as "1h05m", "2m03s" or "7s"."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of "30s", "5m", "2h" or "1d".

    Raises:
        ConfigurationError: it is something else; the message names the option.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ConfigurationError(f"{option} is {text!r}; give a time, as 30s, 5m, 2h or 1d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def work_line(work: LongWork) -> str:
    """Describe work that the shard servers are doing."""
    percent = 100 * work.done_bytes // max(1, work.total_bytes)
    return f"{_DOING.get(work.kind, work.kind)}: {size(work.done_bytes)} of {size(work.total_bytes)} ({percent} %)"


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a line of blocks, the lowest and the highest of them as the ends of the scale."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2] * len(values)
    return "".join(_BLOCKS[int((v - low) / (high - low) * (len(_BLOCKS) - 1) + 0.5)] for v in values)
