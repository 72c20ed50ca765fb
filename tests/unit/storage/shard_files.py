"""Files as shard servers write them, of a manifest that is still to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from axon_ps.storage.checkpoint import FileEntry, TensorSpec, create_file
from axon_ps.storage.contents import UPDATES, by_file, tensor_name
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import Manifest, file_prefix
from axon_ps.types import DType


def put_files(uri: str, manifest: Manifest, token: str = "v1-aa") -> Manifest:
    """Write the file of each shard server, with zeros in it; the manifest with these files.

    Args:
        uri: the directory.
        manifest: a section.
        token: the end of the files' names.
    """
    files = []
    for file, slices in by_file(manifest, manifest.plan.numbered).items():
        name = f"{file_prefix(file, manifest.num_servers)}{token}.safetensors"
        tensors = [spec for s in slices for spec in _tensors(manifest, s.unit, s.begin, s.numel)]
        with create_file(open_store(uri), name, tensors, {}) as writer:
            for spec in tensors:
                writer.write(spec.name, np.zeros(spec.shape, spec.dtype.numpy))
        files.append(writer.entry(name))
    return replace(manifest, files=tuple(files))


def entry_of(uri: str, name: str) -> FileEntry:
    """The manifest's entry of a file that is there."""
    with open_store(uri).open(name) as source:
        content = source.read(0, source.size)
    return FileEntry(name=name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def _tensors(manifest: Manifest, unit: int, begin: int, numel: int) -> Iterator[TensorSpec]:
    trainable, parameters = manifest.layout.units[unit].trainable, len(manifest.layout.units[unit].parameters)
    for name in ("param", *(("exp_avg", "exp_avg_sq") if trainable else ())):
        yield TensorSpec(name=tensor_name(unit, begin, name), dtype=DType.F32, shape=(numel,))
    if trainable:
        yield TensorSpec(name=tensor_name(unit, begin, UPDATES), dtype=DType.I64, shape=(parameters,))
