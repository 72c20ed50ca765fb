"""A checkpoint's parameters as one safetensors file, as Hugging Face and plain PyTorch load it.

Tensors are named as in the user's module and shaped as there; tied parameters appear once, under their first name.
Values are read and written a few MiB at a time, so the memory needed does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Parameter
from axon_ps.storage.checkpoint import (
    SafetensorsReader,
    TensorSpec,
    create_file,
    open_file,
)
from axon_ps.storage.files import FileStore, open_store
from axon_ps.storage.manifest import Manifest, verify
from axon_ps.types import WIRE_DTYPES, Array, DType

BLOCK_NUMEL = 1 << 20
"""Elements converted at a time."""


def export_model(uri: str, target: str, dtype: DType | None = None, *, model: str = "") -> int:
    """Write the parameters of a checkpoint as one `model.safetensors`.

    Args:
        uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
        target: the file to write, a path or "scheme://..."; replaced if it exists.
        dtype: F32, BF16 or F16 for every tensor; None = those of the user's model.
        model: name of the model, where the checkpoint has several.

    Returns:
        Bytes written.

    Raises:
        InvalidRequest: `dtype` is none of those, `target` is not a file name, or the checkpoint has no such model.
        CheckpointNotFound: there is no complete checkpoint at `uri`.
        CheckpointCorrupt: a file of it is missing, truncated or altered.
        StorageFull: no space left for the target; nothing of it remains.
        CheckpointError: a file could not be read or written.
    """
    if dtype is not None and dtype not in WIRE_DTYPES:
        raise InvalidRequest(f"a model cannot be exported as {dtype.value}; use f32, bf16 or f16")
    store, name = _target(target)
    manifest = verify(uri).section(model, only=not model)
    source = open_store(manifest.uri)
    tensors = [TensorSpec(name=p.name, dtype=dtype or p.dtype, shape=p.shape) for _, p in manifest.layout.parameters()]
    with ExitStack() as files:
        readers = [files.enter_context(open_file(source, entry.name)) for entry in manifest.files]
        with create_file(store, name, tensors, {"format": "pt"}) as writer:
            for (unit, parameter), tensor in zip(manifest.layout.parameters(), tensors, strict=True):
                for values in _values(manifest, readers, unit, parameter):
                    writer.write(tensor.name, _converted(values, tensor.dtype))
        return writer.entry(name).bytes


def _target(target: str) -> tuple[FileStore, str]:
    """The directory and the name of the file to write."""
    scheme, colon, path = target.partition("://")
    directory, _, name = (path if colon else target).rpartition("/")
    if not name:
        raise InvalidRequest(f"{target!r} does not end in a file name")
    if colon:
        return open_store(f"{scheme}://{directory}"), name
    return open_store(directory or ("/" if target.startswith("/") else ".")), name


def _values(
    manifest: Manifest, readers: Sequence[SafetensorsReader], unit: int, parameter: Parameter
) -> Iterator[Array]:
    """The elements of one parameter in order, f32, block by block."""
    for owned in manifest.plan.slices[unit]:
        begin, end = max(owned.begin, parameter.offset), min(owned.end, parameter.end)
        for first in range(begin, end, BLOCK_NUMEL):
            values = np.empty(min(first + BLOCK_NUMEL, end) - first, np.float32)
            readers[manifest.file_of(owned)].read_into(f"{unit}.{owned.begin}.param", first - owned.begin, values)
            yield values


def _converted(values: Array, dtype: DType) -> Array:
    """f32 values in another dtype, rounded to nearest."""
    if dtype in WIRE_DTYPES:
        from axon_ps.compress import cast

        return cast.encoded(values, dtype)
    return values.astype(dtype.numpy) if dtype.is_float else np.rint(values).astype(dtype.numpy)
