"""`DeviceBackend`: lets the suite, which makes numpy arrays, run on a backend of device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from axon_ps.collectives.backends.base import Backend
from axon_ps.collectives.backends.request import Request
from axon_ps.errors import AxonError
from axon_ps.types import Array, DType


class DeviceBackend(Backend):
    """Copies arrays to the device, lets the backend make the call there, and copies them back.

    Args:
        backend: a backend of device arrays.
        to_device: makes a device array of a numpy array; such arrays have cupy's `get()`, and slices share memory.
    """

    name: ClassVar[str] = "device"

    def __init__(self, backend: Backend, to_device: Callable[[Array], Any]) -> None:
        super().__init__(backend.context)
        self._backend = backend
        self.dtypes = backend.dtypes
        self._to_device = to_device

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        data, output = request.data, request.output
        device_data, device_output = (None if a is None else self._to_device(a) for a in (data, output))
        if data is not None and output is not None and data.size and np.may_share_memory(data, output):
            if data.size <= output.size:
                device_data = _same_range(device_output, output, data)
            else:
                device_output = _same_range(device_data, data, output)
        staged = Request(
            call=request.call,
            data=device_data,
            output=device_output,
            output_counts=request.output_counts,
            input_counts=request.input_counts,
        )
        self._backend.run(staged, timeout_s)
        for host, device in ((data, device_data), (output, device_output)):
            if host is not None and device is not None and host.flags.writeable:
                np.copyto(host, device.get())

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        self._backend.send(self._to_device(data), dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        device = self._to_device(data)
        sender = self._backend.recv(device, dtype, source, tag, timeout_s)
        np.copyto(data, device.get())
        return sender

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`."""
        self._backend.abort(error)

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()


def _same_range(device_buffer: Any, buffer: Array, view: Array) -> Any:
    """Return the part of the device's array that corresponds to `view` of the host's."""
    begin = (view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]) // buffer.itemsize
    return device_buffer[begin : begin + view.size]
