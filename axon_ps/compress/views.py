"""How compiled loops are given the arrays that they only read."""

from __future__ import annotations

from axon_ps.types import Array


def readonly(array: Array) -> Array:
    """A read-only view, so that received bytes and our own arrays share one compiled loop."""
    view = array.view()
    view.flags.writeable = False
    return view
