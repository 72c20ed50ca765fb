"""`Stage`: a backend that does part of another backend's collectives, in host memory if it knows no other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from axon_ps.collectives.backend import Backend, Call, Operation
from axon_ps.collectives.request import Request, perform
from axon_ps.types import Array, DType, ReduceOp


class Stage:
    """A backend that does parts of collectives, with its own numbering of calls.

    Args:
        backend: what does them.
        host: whether it takes host memory only; arrays on a device are staged then.
    """

    def __init__(self, backend: Backend, *, host: bool) -> None:
        self.backend = backend
        self._host = host
        self._sequence = 0

    def run(
        self,
        operation: Operation,
        dtype: DType,
        deadline: float,
        *,
        counts: Sequence[int] = (),
        data: Array | None = None,
        output: Array | None = None,
        op: ReduceOp | None = None,
        root: int = -1,
        reason: str = "",
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> None:
        """Make a call."""
        call = Call(
            sequence=self._sequence,
            operation=operation,
            dtype=dtype,
            counts=tuple(counts),
            op=op,
            root=root,
            reason=reason,
        )
        self._sequence += 1
        staged_data, staged_output = (self._staged(data), self._staged(output)) if self._host else (data, output)
        request = Request(
            call=call,
            data=staged_data,
            output=staged_output,
            output_counts=tuple(received),
            input_counts=tuple(sent),
        )
        perform(self.backend, request, max(0.001, deadline - time.monotonic()))
        result, target = (staged_data, data) if output is None else (staged_output, output)
        if result is not target:
            target.set(result)  # type: ignore[union-attr]  # a cupy array

    def _staged(self, array: Array | None) -> Array | None:
        if array is None or not on_device(array):
            return array
        host: Array = array.get()  # type: ignore[attr-defined]  # a cupy array
        return host


def on_device(array: Any) -> bool:
    """Whether an array is in device memory: a cupy array, which moves by `get` and `set`."""
    return hasattr(array, "__cuda_array_interface__")
