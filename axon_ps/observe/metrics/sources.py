"""Sources of this process's metrics: a weak list of the objects whose `.statistics()` are exposed.

Registering costs a list entry; statistics are read at a scrape only. An object that is freed leaves the list when
another one is registered.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from axon_ps.observe.metrics.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class Source:
    """An object that has statistics.

    Attributes:
        kind: a key of `table.TABLE`.
        read: its `.statistics`.
        labels: the labels that distinguish it from others of its kind.
        histograms: its histograms, by a key of `table.HISTOGRAMS`.
    """

    kind: str
    read: Callable[[], Mapping[str, float]]
    labels: Mapping[str, str] = field(default_factory=dict)
    histograms: Callable[[], Mapping[str, Histogram]] = dict


_lock = threading.Lock()
_registered: list[Callable[[], Source | None]] = []


def register(kind: str, owner: object, **labels: str) -> None:
    """Expose the statistics of `owner` as long as it lives.

    Args:
        kind: a key of `table.TABLE`.
        owner: an object with `.statistics()`.
        labels: the labels that distinguish it from others of its kind.
    """
    reference = weakref.ref(owner)

    def source() -> Source | None:
        alive = reference()
        return None if alive is None else Source(kind=kind, read=alive.statistics, labels=labels)  # type: ignore[attr-defined]

    with _lock:
        _registered[:] = [one for one in _registered if one() is not None]
        _registered.append(source)


def registered() -> Iterator[Source]:
    """Return the sources that still live."""
    with _lock:
        found = [one() for one in _registered]
    return (source for source in found if source is not None)
