"""A checkpoint's parameters as safetensors files, as Hugging Face and plain PyTorch load them.

Tensors are named as in the user's module and shaped as there, also those that the servers have as boxes. Tied
parameters appear once, under their first name. Values are read and written a few MiB at a time, so the memory needed
does not grow with the model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from safetensors import deserialize

from axon_ps.errors import InvalidRequest
from axon_ps.observe.work import LongWork
from axon_ps.sharding import raw
from axon_ps.sharding.layout import ELEMENT_BYTES, Parameter
from axon_ps.sharding.moves import TensorSources
from axon_ps.storage.checkpoint import TensorSpec, create_file
from axon_ps.storage.contents import BLOCK_NUMEL, OpenSlices, open_slices, read_attached
from axon_ps.storage.files import FileStore, open_store
from axon_ps.storage.manifest import Manifest, read_manifest
from axon_ps.types import BUFFERS, ELEMENTS, Array, DType, parse_dtype

_logger = logging.getLogger(__name__)


def export_model(
    uri: str, target: str, dtype: DType | str | None = None, *, model: str = "", work: LongWork | None = None
) -> int:
    """Write the parameters and buffers of a checkpoint as one `model.safetensors`.

    Args:
        uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
        target: the file to write, a path or "scheme://..."; replaced if it exists.
        dtype: that of parameters and f32 buffers, as `parse_dtype` takes it; None = those of the user's model.
        model: name of the model, if the checkpoint has several.
        work: gets the bytes to read and to write, and the bytes that were read and written.

    Returns:
        Bytes written.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, `target` is not a file name, or the checkpoint has no such model.
        CheckpointNotFound: there is no complete checkpoint at `uri`.
        CheckpointCorrupt: a file of it is missing, truncated or altered.
        StorageFull: no space left for the target. Nothing of it remains.
        CheckpointError: a file could not be read or written.
    """
    as_dtype = None if dtype is None else parse_dtype(dtype)
    store, name = _target(target)
    manifest = read_manifest(uri).section(model, only=not model)
    exports = exports_of(manifest, as_dtype)
    with open_model(manifest, work) as source:
        return write_exports(source, store, {name: exports}, work)[name]


def open_model(manifest: Manifest, work: LongWork | None = None) -> OpenSlices:
    """Open the parameters of a section: its files are read and checked, and `work` counts that.

    Raises:
        CheckpointCorrupt: a file is missing, truncated, altered or not what the manifest says.
        CheckpointError: one could not be read.
    """
    if work is not None:
        work.total_bytes += sum(entry.bytes for entry in manifest.files)
    return open_slices(manifest, manifest.plan.numbered, work=work)


@dataclass(frozen=True, kw_only=True)
class Export:
    """A parameter or buffer of a checkpoint, and the tensor that it becomes.

    Attributes:
        parameter: the whole tensor, one of `Layout.tensors`; None = it is a buffer.
        tensor: name, dtype and shape in the file.
        values: those of a buffer, in storage dtype.
    """

    parameter: Parameter | None
    tensor: TensorSpec
    values: Array | None = field(default=None, compare=False, repr=False)


def exports_of(manifest: Manifest, dtype: DType | None, prefix: str = "") -> list[Export]:
    """Return the exported form of a model: its parameters, a tied one under its first name, and its buffers.

    Args:
        manifest: the model's section.
        dtype: a wire dtype for parameters of floating-point numbers, and f32 buffers; None = those of the user's model.
        prefix: only tensors whose names begin with it are exported, and it is left out of their names.

    Raises:
        InvalidRequest: no parameter has the prefix.
    """
    found = [
        Export(
            parameter=p,
            tensor=TensorSpec(name=p.name.removeprefix(prefix), dtype=_written(p, dtype), shape=p.shape),
        )
        for p in manifest.layout.tensors
        if p.name.startswith(prefix)
    ]
    if not found:
        names = [p.name for p in manifest.layout.tensors]
        raise InvalidRequest(f"no parameter's name begins with {prefix!r}; the first ones are {', '.join(names[:3])}")
    return [*found, *_buffers(manifest, dtype, prefix, {export.tensor.name for export in found})]


def _buffers(manifest: Manifest, dtype: DType | None, prefix: str, taken: Collection[str]) -> Iterator[Export]:
    """Yield the buffers of a checkpoint: those of f32 in `dtype`, others as they are."""
    key = f"{BUFFERS}{manifest.name}"
    if key not in manifest.attached:
        return
    tensors = deserialize(read_attached(manifest, key))  # type: ignore[no-untyped-call]
    for name, tensor in tensors:
        retained = next((d for d in ELEMENTS if d.value.upper() == tensor["dtype"]), None)
        if not name.startswith(prefix) or name.removeprefix(prefix) in taken:
            continue
        if retained is None:
            _logger.warning("buffer %r is not exported: there is no way to write its dtype, %s", name, tensor["dtype"])
            continue
        values: Array = np.frombuffer(bytes(tensor["data"]), retained.numpy)
        written = dtype if dtype is not None and retained is DType.F32 else retained
        yield Export(
            parameter=None,
            tensor=TensorSpec(name=name.removeprefix(prefix), dtype=written, shape=tuple(tensor["shape"])),
            values=raw.encoded_as(values, written) if retained is DType.F32 else values,
        )


def write_exports(
    source: OpenSlices, store: FileStore, files: Mapping[str, Sequence[Export]], work: LongWork | None = None
) -> dict[str, int]:
    """Write safetensors files; returns the bytes of each by its name.

    Args:
        source: the parameters.
        store: the directory to write to.
        files: the content of each file, by its name.
        work: gets the bytes to write, and the bytes that were written.

    Raises:
        InvalidRequest: two tensors of a file have the same name.
        StorageFull: no space left for a file. Nothing of it remains.
        CheckpointError: a file could not be read or written.
    """
    sizes, origin = {}, TensorSources(source.manifest.layout)
    for name, exports in files.items():
        with create_file(store, name, [e.tensor for e in exports], {"format": "pt"}, work=work) as writer:
            for export in exports:
                if export.parameter is None:
                    assert export.values is not None
                    writer.write(export.tensor.name, export.values)
                    continue
                for values in _values(source, origin, export.parameter, export.tensor.dtype):
                    writer.write(export.tensor.name, values)
        sizes[name] = writer.entry(name).bytes
    return sizes


def _target(target: str) -> tuple[FileStore, str]:
    """Return the directory and the name of the file to write."""
    scheme, colon, path = target.partition("://")
    directory, _, name = (path if colon else target).rpartition("/")
    if not name:
        raise InvalidRequest(f"{target!r} does not end in a file name")
    if colon:
        return open_store(f"{scheme}://{directory}"), name
    return open_store(directory or ("/" if target.startswith("/") else ".")), name


def _written(parameter: Parameter, dtype: DType | None) -> DType:
    """Return the dtype in which a parameter is written. Only numbers are converted."""
    return parameter.dtype if dtype is None or (parameter.raw and not parameter.dtype.is_float) else dtype


def _values(source: OpenSlices, origin: TensorSources, tensor: Parameter, dtype: DType) -> Iterator[Array]:
    """Yield the elements of one whole tensor in order, as they are written, block by block."""
    for begin in range(0, tensor.numel, BLOCK_NUMEL):
        values = np.zeros(min(BLOCK_NUMEL, tensor.numel - begin), np.float32)
        for move in origin.moves_of(0, tensor, begin, begin + values.size):
            source.copy(move, values, begin)
        if tensor.raw and dtype is tensor.dtype:
            yield values.view(np.uint8)[: tensor.nbytes - begin * ELEMENT_BYTES]
        else:
            elements = raw.elements_in(tensor, begin, begin + values.size)
            yield raw.encoded_as(raw.numbers_of(values, tensor, begin, *elements), dtype)
