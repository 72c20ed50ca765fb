"""Sources of this process's metrics: a weak list of everything whose `.statistics()` are to be seen.

Registering costs a list entry; nothing is read before somebody asks. An object that is freed is seen no more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from axon_ps.observe.metrics.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing that has statistics.

    Attributes:
        kind: a key of `table.TABLE`.
        read: its `.statistics`.
        labels: what distinguishes it from others of its kind.
        histograms: its histograms, by a key of `table.HISTOGRAMS`.
    """

    kind: str
    read: Callable[[], Mapping[str, float]]
    labels: Mapping[str, str] = field(default_factory=dict)
    histograms: Callable[[], Mapping[str, Histogram]] = dict


_lock = threading.Lock()
_registered: list[Callable[[], Source | None]] = []


def register(kind: str, owner: object, **labels: str) -> None:
    """Have the statistics of `owner` seen as long as it lives.

    Args:
        kind: a key of `table.TABLE`.
        owner: has `.statistics()`.
        labels: what distinguishes it from others of its kind.
    """
    reference = weakref.ref(owner)

    def source() -> Source | None:
        alive = reference()
        return None if alive is None else Source(kind=kind, read=alive.statistics, labels=labels)  # type: ignore[attr-defined]

    with _lock:
        _registered[:] = [one for one in _registered if one() is not None]
        _registered.append(source)


def registered() -> Iterator[Source]:
    """Those that live."""
    with _lock:
        found = [one() for one in _registered]
    return (source for source in found if source is not None)
