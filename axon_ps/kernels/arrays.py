"""Arguments of compiled loops: checks of arrays, and read-only views of those that a loop does not write."""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.types import Array


def check_array(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Check that an array is a contiguous dtype[shape]: a compiled loop does not check where it writes.

    Args:
        name: the array's name in messages.
        array: the array.
        dtype: its element type.
        shape: its shape.

    Raises:
        InvalidRequest: it is not.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise InvalidRequest(
            f"{name} is {array.dtype}{list(array.shape)} with strides {array.strides}; needed is a contiguous "
            f"{dtype}{list(shape)}"
        )


def readonly(array: Array) -> Array:
    """Return a read-only view, so that received bytes and our own arrays share one compiled loop."""
    view = array.view()
    view.flags.writeable = False
    return view
