"""Curves over time in bounded memory, independent of the length of the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from axon_ps.wire.v1 import watch_pb2

MAX_POINTS: Final = 256
"""Most points of a curve. When it is full, each two neighbours become one."""

MAX_CURVES: Final = 40
MAX_NAME: Final = 64

Point = tuple[float, float, float]
"""The time, the step reported with it, the value."""


class Curve:
    """One curve: means of `stride` points each, and the points that came since."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._recent: list[Point] = []
        self._stride = 1

    def add(self, point: Point) -> None:
        """Add a point that is later than those before."""
        self._recent.append(point)
        if len(self._recent) < self._stride:
            return
        self._points.append(_mean(self._recent))
        self._recent = []
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    def points(self) -> list[Point]:
        """Return all points. The newest is not averaged."""
        return [*self._points, *self._recent[-1:]]


class Curves:
    """Curves by name, and the points that are new since `take_new`. Names beyond `MAX_CURVES` are dropped."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._new: dict[str, list[Point]] = {}

    def add(self, at_s: float, step: float, values: Mapping[str, float]) -> None:
        """Add a point to each of several curves. Values that are not finite are left out."""
        for name, value in values.items():
            if not math.isfinite(value) or len(name) > MAX_NAME:
                continue
            if name not in self._curves and len(self._curves) >= MAX_CURVES:
                continue
            point = (at_s, step, float(f"{value:.6g}"))
            self._curves.setdefault(name, Curve()).add(point)
            new = self._new.setdefault(name, [])
            new.append(point)
            del new[:-MAX_POINTS]

    def take_new(self) -> list[watch_pb2.Curve]:
        """Return the points since the last call of this method."""
        new, self._new = self._new, {}
        return [_message(name, points) for name, points in new.items()]

    def everything(self) -> list[watch_pb2.Curve]:
        """Return all points."""
        return [_message(name, curve.points()) for name, curve in self._curves.items()]


def _mean(points: Sequence[Point]) -> Point:
    """Return the mean value, at the time and step of the last point."""
    return (*points[-1][:2], float(f"{sum(p[2] for p in points) / len(points):.6g}"))


def _message(name: str, points: Sequence[Point]) -> watch_pb2.Curve:
    return watch_pb2.Curve(
        name=name, at_s=[p[0] for p in points], step=[p[1] for p in points], value=[p[2] for p in points]
    )
