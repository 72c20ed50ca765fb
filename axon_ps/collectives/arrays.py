"""The arrays that users have, as the flat arrays that backends take, without a copy if possible: numpy, torch and cupy,
and whatever else gives its host memory by the buffer protocol (`array.array`, `memoryview`) or by DLPack (JAX).

torch is never imported here: whoever passes a tensor has done so. A bf16 array is a `uint16` one to us, whether it is
torch's bfloat16 or ml_dtypes'; blocks of int8 are numpy arrays of `DType.INT8_BLOCK.numpy`. Device memory becomes a
flat cupy array (see `collectives.cuda.flat_view`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from axon_ps.collectives import cuda
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array, DType

_BY_NAME = {
    "float64": DType.F64,
    "float32": DType.F32,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "int64": DType.I64,
    "int32": DType.I32,
    "uint8": DType.U8,
    "bool": DType.BOOL,
}


@dataclass(frozen=True)
class Flat:
    """An array of the user's as a backend takes it.

    Attributes:
        array: T[numel], contiguous: the user's memory, or a copy of it.
        dtype: its element type.
        shape: the user's shape.
        device: whether it is device memory.
        write_back: copies a staged result to the user's array; None when `array` is the user's memory.
        stream: device memory: the CUDA stream that was the caller's current one.
    """

    array: Array
    dtype: DType
    shape: tuple[int, ...]
    device: bool = False
    write_back: Callable[[], object] | None = None
    stream: int = 0

    def finish(self) -> None:
        """The backend has written `array`: see that the user's array has it."""
        if self.write_back is not None:
            self.write_back()


def flatten(data: Any, *, writable: bool = True, what: str = "data") -> Flat:
    """Take an array.

    Args:
        data: numpy, torch or cupy array of any shape and layout, or what gives such memory by the buffer protocol or
            DLPack; or a `Flat`, as it is.
        writable: whether results will be written to it.
        what: what messages call it.

    Raises:
        InvalidRequest: it is no array, of a dtype that does not travel, or read-only though it must be written.
    """
    if isinstance(data, Flat):
        return data
    if _is_cupy(data):
        return _device(data, tuple(data.shape), _dtype(str(data.dtype), what))
    if isinstance(data, np.ndarray):
        return _numpy(data, writable, what)
    if is_torch(data):
        return _torch(data, what)
    return _numpy(_seen_by_numpy(data, what), writable, what)


def empty_like(data: Any, shape: tuple[int, ...]) -> Any:
    """An array of another shape, of the same kind and dtype and in the same place as `data`; numpy's, if of no kind."""
    if is_torch(data):
        return data.new_empty(shape)
    if _is_cupy(data):
        return type(data)(shape, dtype=data.dtype)
    return np.empty(shape, (data if isinstance(data, np.ndarray) else _seen_by_numpy(data, "data")).dtype)


def on_device(data: Any) -> bool:
    """Whether this is an array in device memory; not an error of anything else."""
    if isinstance(data, Flat):
        return data.device
    return cuda.memory().holds(data) if is_torch(data) else hasattr(data, "__cuda_array_interface__")


def is_torch(data: Any) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)


def _is_cupy(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "cupy"


def _seen_by_numpy(data: Any, what: str) -> np.ndarray[Any, Any]:
    """Somebody else's host memory as an array, which shares it.

    Raises:
        InvalidRequest: it gives none.
    """
    try:
        return np.from_dlpack(data) if hasattr(data, "__dlpack__") else np.asarray(memoryview(data))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidRequest(
            f"{what} is a {type(data).__name__}; give a numpy, torch or cupy array, or what has the buffer protocol or "
            f"DLPack ({error})"
        ) from error


def _numpy(data: np.ndarray[Any, Any], writable: bool, what: str) -> Flat:
    blocks = data.dtype == DType.INT8_BLOCK.numpy
    dtype = DType.INT8_BLOCK if blocks else _dtype(data.dtype.name, what)
    if not data.dtype.isnative:
        raise InvalidRequest(f"{what} is {data.dtype}, not in this machine's byte order; give {data.dtype.name}")
    if writable and not data.flags.writeable:
        raise InvalidRequest(f"{what} is read-only, and the result goes there; give a writable array, or out=")
    plain = data.view(dtype.numpy) if dtype is DType.BF16 else data
    if plain.flags.c_contiguous:
        return Flat(plain.reshape(-1), dtype, data.shape)
    staged = plain.reshape(-1)  # a copy, in C order
    return Flat(staged, dtype, data.shape, write_back=lambda: np.copyto(plain, staged.reshape(plain.shape)))


def _torch(data: Any, what: str) -> Flat:
    torch = sys.modules["torch"]
    dtype = _dtype(str(data.dtype).removeprefix("torch."), what)
    tensor = data.detach()
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"{what} is a {tensor.layout} tensor on {tensor.device}; give a dense one on cpu or cuda")
    dense, write_back = tensor, None
    if not tensor.is_contiguous():
        dense = tensor.contiguous()

        def write_back() -> None:
            tensor.copy_(dense)

    shape = tuple(data.shape)
    if cuda.memory().holds(tensor):
        return _device(dense, shape, dtype, write_back)
    flat = dense.reshape(-1)
    array = flat.view(torch.int16).numpy().view(np.uint16) if dtype is DType.BF16 else flat.numpy()
    return Flat(array, dtype, shape, write_back=write_back)


def _device(data: Any, shape: tuple[int, ...], dtype: DType, write_back: Callable[[], object] | None = None) -> Flat:
    array, stream = cuda.flat_view(data, dtype), cuda.current_stream(data)
    return Flat(array, dtype, shape, device=True, write_back=write_back, stream=stream)


def on_stream(flat: Flat | None) -> contextlib.AbstractContextManager[object]:
    """Makes the stream that was current when `flat` was taken the current one of this thread, for cupy and torch."""
    if flat is None or not flat.device:
        return contextlib.nullcontext()
    return cuda.on_stream(flat.array, flat.stream)


def _dtype(name: str, what: str) -> DType:
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise InvalidRequest(f"{what} is {name}, which does not travel; use one of {', '.join(_BY_NAME)}")
    return dtype
