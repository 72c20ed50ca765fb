"""`Stage`: a backend that performs one stage of another backend's collectives; stages device memory if it must."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from axon_ps.collectives.backends.base import Backend, Call, Operation, Request
from axon_ps.collectives.staging import Staging
from axon_ps.types import Array, DType, ReduceOp


class Stage:
    """A backend that performs stages of another backend's collectives, with its own numbering of calls.

    Args:
        backend: performs them.
        staging: copies device arrays to host memory and back, for a backend that accepts host memory only; None = the
            backend accepts device arrays.
    """

    def __init__(self, backend: Backend, staging: Staging | None = None) -> None:
        self.backend = backend
        self._staging = staging
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
        prepare: Callable[[Array], object] | None = None,
    ) -> None:
        """Make a call. `prepare` first changes the data in place (the copy in host memory, if it is staged)."""
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
        request = Request(call=call, data=data, output=output, output_counts=tuple(received), input_counts=tuple(sent))
        self.perform(request, max(0.001, deadline - time.monotonic()), prepare)

    def perform(self, request: Request, timeout_s: float, prepare: Callable[[Array], object] | None = None) -> None:
        """Make a call that the caller has numbered; device arrays are staged if they must be."""
        data, output = request.data, request.output
        staging = self._staging
        if staging is None or not any(map(on_device, (data, output))):
            if prepare is not None and data is not None:
                prepare(data)
            self.backend.run(request, timeout_s)
            return
        host_data, host_output = (None if a is None else staging.allocate(a) for a in (data, output))
        try:
            if data is not None and host_data is not None and self._reads(request.call):
                staging.download(data, host_data)
                if prepare is not None:
                    prepare(host_data)
            staged = Request(
                call=request.call,
                data=host_data,
                output=host_output,
                output_counts=request.output_counts,
                input_counts=request.input_counts,
            )
            self.backend.run(staged, timeout_s)
            if output is not None and host_output is not None:
                staging.upload(host_output, output)
            elif data is not None and host_data is not None and request.target(self.backend.rank) is data:
                staging.upload(host_data, data)
        finally:
            for host in (host_data, host_output):
                if host is not None:
                    staging.free(host)

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`; any thread may call it."""
        if self._staging is None or not on_device(data):
            self.backend.send(data, dtype, to, tag, timeout_s)
            return
        host = self._staging.allocate(data)
        try:
            self._staging.download(data, host)
            self.backend.send(host, dtype, to, tag, timeout_s)
        finally:
            self._staging.free(host)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`; any thread may call it."""
        if self._staging is None or not on_device(data):
            return self.backend.recv(data, dtype, source, tag, timeout_s)
        host = self._staging.allocate(data)
        try:
            sender = self.backend.recv(host, dtype, source, tag, timeout_s)
            self._staging.upload(host, data)
            return sender
        finally:
            self._staging.free(host)

    def _reads(self, call: Call) -> bool:
        """Return True if the call reads this rank's data."""
        return call.operation is not Operation.BROADCAST or call.root == self.backend.rank


def on_device(array: Any) -> bool:
    """Return True for an array in device memory: a cupy array."""
    return hasattr(array, "__cuda_array_interface__")
