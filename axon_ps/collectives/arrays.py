"""Users' arrays as the flat arrays that backends take, without a copy if possible: numpy, torch and cupy, and all
others that give their host memory by the buffer protocol (`array.array`, `memoryview`) or by DLPack (JAX).

torch is never imported here: a caller with a tensor has done so. A bf16 array becomes a `uint16` one, whether it is
torch's bfloat16 or ml_dtypes'; blocks of int8 are numpy arrays of `DType.INT8_BLOCK.numpy`. Device memory becomes a
flat cupy array (see `collectives.cuda.flat_view`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from axon_ps.collectives import cuda
from axon_ps.errors import InvalidRequest
from axon_ps.types import COLLECTIVE_DTYPES, NUMBERS, Array, DType, parse_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BY_NAME = {dtype.torch_name: dtype for dtype in NUMBERS}
_BY_NUMPY = {dtype.numpy: dtype for dtype in COLLECTIVE_DTYPES if dtype is not DType.BF16}  # numpy itself has no bf16


class GivesDLPack(Protocol):
    """An array of a library with DLPack: numpy, torch, cupy, JAX."""

    @property
    def __dlpack__(self) -> Callable[..., Any]:
        """Gives its memory."""


@dataclass(frozen=True)
class Flat:
    """A user's array in the form that a backend takes.

    Attributes:
        array: T[numel], contiguous: the user's memory, or a copy of it.
        dtype: its element type.
        shape: the user's shape.
        device: True for device memory.
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
        """Copy the result that a backend has written to `array` to the user's array, if it is another."""
        if self.write_back is not None:
            self.write_back()


if TYPE_CHECKING:
    AnyArray = Buffer | GivesDLPack | Flat

T = TypeVar("T", bound="AnyArray")
ListT = TypeVar("ListT", bound="Sequence[AnyArray]")


def flatten(data: Any, *, writable: bool = True, what: str = "data") -> Flat:
    """Return the flat array for a user's array.

    Args:
        data: numpy, torch or cupy array of any shape and layout, or an object with the buffer protocol or DLPack; a
            `Flat` is returned as it is.
        writable: True = results will be written to it.
        what: its name in messages.

    Raises:
        InvalidRequest: it is not an array, is of a dtype that does not travel, or is read-only although it must be
            written.
        NcclError: it is in device memory, and cupy cannot be used.
    """
    if type(data) is np.ndarray:
        return _numpy(data, writable, what)
    if isinstance(data, Flat):
        return data
    if _is_cupy(data):
        return _device(data, tuple(data.shape), _dtype(str(data.dtype), what))
    if isinstance(data, np.ndarray):
        return _numpy(data, writable, what)
    if is_torch(data):
        return _torch(data, what)
    return _numpy(_as_numpy(data, what), writable, what)


def empty_like(data: Any, shape: tuple[int, ...]) -> Any:
    """Make a new array of another shape, of the library, dtype and device of `data`; numpy's for other libraries."""
    if is_torch(data):
        return data.new_empty(shape)
    if _is_cupy(data):
        return type(data)(shape, dtype=data.dtype)
    return np.empty(shape, (data if isinstance(data, np.ndarray) else _as_numpy(data, "data")).dtype)


def numpy_dtype(given: object) -> np.dtype[Any]:
    """Return the numpy dtype of an argument `dtype`: numpy's, torch's or ours, or its name.

    Raises:
        InvalidRequest: numpy has no such dtype.
    """
    if given is not None:
        with contextlib.suppress(TypeError):
            return np.dtype(given)  # type: ignore[call-overload, no-any-return]
    return parse_dtype(given, among=tuple(dtype for dtype in NUMBERS if dtype is not DType.BF16)).numpy


def on_device(data: Any) -> bool:
    """Return True for an array in device memory, False for anything else."""
    if type(data) is np.ndarray:
        return False
    if isinstance(data, Flat):
        return data.device
    return cuda.memory().is_on_device(data) if is_torch(data) else hasattr(data, "__cuda_array_interface__")


def is_torch(data: Any) -> bool:
    """Return True for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)


def is_parameter(data: Any) -> bool:
    """Return True for a parameter of torch, also a frozen one."""
    return is_torch(data) and isinstance(data, sys.modules["torch"].nn.Parameter)


def _is_cupy(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "cupy"


def _as_numpy(data: Any, what: str) -> np.ndarray[Any, Any]:
    """Return the host memory of an object of another library, as an array that shares it.

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
    dtype = _BY_NUMPY.get(data.dtype) or _dtype(data.dtype.name, what)
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
    check_memory(data, what)
    dtype = _dtype(str(data.dtype).removeprefix("torch."), what)
    tensor = data.detach()
    dense, write_back = tensor, None
    if not tensor.is_contiguous():
        dense = tensor.contiguous()

        def write_back() -> None:
            tensor.copy_(dense)

    shape = tuple(data.shape)
    if cuda.memory().is_on_device(tensor):
        return _device(dense, shape, dtype, write_back)
    flat = dense.reshape(-1)
    array = flat.view(torch.int16).numpy().view(np.uint16) if dtype is DType.BF16 else flat.numpy()
    return Flat(array, dtype, shape, write_back=write_back)


def check_memory(tensor: Any, what: str) -> None:
    """Check that a torch tensor has memory of its own with one element of its dtype after the other.

    Raises:
        InvalidRequest: they do not: sparse, nested, quantised, meta tensors, tensors of classes that hold others, and
            those whose storage was freed.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise InvalidRequest(f"{what} is a {kind} tensor on {tensor.device}; give a dense one on cpu or cuda")
    if tensor.is_quantized:
        raise InvalidRequest(f"{what} is quantised ({tensor.dtype}); give its int_repr(), or dequantize() it")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidRequest(
            f"{what} is a {type(tensor).__name__}, whose elements are those of other tensors; give one of them "
            "(to_local() of a DTensor), or a plain tensor"
        )
    if tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.storage_offset() + last + 1
        if end * tensor.element_size() > (there := tensor.untyped_storage().nbytes()):
            raise InvalidRequest(
                f"{what} has {tensor.numel()} elements and a storage of {there} bytes, which was freed or resized; is "
                "it a parameter of a sharded unit, outside of its forward and backward?"
            )


def _device(data: Any, shape: tuple[int, ...], dtype: DType, write_back: Callable[[], object] | None = None) -> Flat:
    array, stream = cuda.flat_view(data, dtype), cuda.current_stream(data)
    return Flat(array, dtype, shape, device=True, write_back=write_back, stream=stream)


def on_stream(flat: Flat | None) -> contextlib.AbstractContextManager[object]:
    """Make the stream that was current when `flat` was taken the current one of this thread, for cupy and torch."""
    if flat is None or not flat.device:
        return contextlib.nullcontext()
    return cuda.on_stream(flat.array, flat.stream)


def _dtype(name: str, what: str) -> DType:
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise InvalidRequest(f"{what} is {name}, which does not travel; use one of {', '.join(_BY_NAME)}")
    return dtype
