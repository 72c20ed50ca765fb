"""A checkpoint as a Hugging Face directory: safetensors files, their index, config and tokenizer beside them.

If there are several safetensors files, their index, `model.safetensors.index.json`, is written last. So an incomplete
directory of several files is not loaded. Values are read and written a few MiB at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from axon_ps.errors import InvalidRequest
from axon_ps.observe.work import LongWork
from axon_ps.storage.export import Export, exports_of, open_model, write_exports
from axon_ps.storage.files import FileStore, open_store
from axon_ps.storage.manifest import read_manifest
from axon_ps.texts import value_of_json
from axon_ps.types import DType, parse_dtype

MAX_FILE_BYTES: Final = 5 << 30
"""Most bytes of tensors in a file that has several of them."""

SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json", ".ckpt")
_BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".py", ".md")
_MAX_BESIDE_BYTES: Final = 256 << 20


def export_directory(
    uri: str,
    target: str,
    dtype: DType | str | None = None,
    *,
    model: str = "",
    like: str | None = None,
    prefix: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    work: LongWork | None = None,
) -> int:
    """Write the parameters and buffers of a checkpoint as a directory that `from_pretrained` reads.

    Args:
        uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
        target: the directory, a path or "scheme://...". Its weights are replaced.
        dtype: that of parameters and f32 buffers, as `parse_dtype` takes it; None = those of the user's model.
        model: name of the model, if the checkpoint has several.
        like: a directory of the same model, whose config, tokenizer and the like are copied; None = none are.
        prefix: only tensors whose names begin with it are written, and it is left out of their names: "gpt2." of a
            LightningModule that has the transformers model as its `gpt2`.
        max_file_bytes: most bytes of tensors in a file that has several of them.
        work: gets the bytes to read and to write, and the bytes that were read and written.

    Returns:
        Bytes of the tensors' files.

    Raises:
        InvalidRequest: a value is out of range, the checkpoint has no such model or prefix, `like` has no config.json
            or a file that is too large, or config.json is not a JSON object.
        CheckpointNotFound: there is no complete checkpoint at `uri`.
        CheckpointCorrupt: a file of it is missing, truncated or altered.
        StorageFull: no space left for the target.
        CheckpointError: a file could not be read or written.
    """
    as_dtype = None if dtype is None else parse_dtype(dtype)
    if max_file_bytes < 1:
        raise InvalidRequest(f"max_file_bytes is {max_file_bytes}; it must be above 0")
    beside = () if like is None else _beside(open_store(like))
    manifest = read_manifest(uri).section(model, only=not model)
    files = _divided(exports_of(manifest, as_dtype, prefix), max_file_bytes)
    store = open_store(target)
    with open_model(manifest, work) as source:
        for name in store.names():  # or a reader would find the old index, or the old single file
            if name in (SINGLE, INDEX):
                store.remove(name)
        sizes = write_exports(source, store, files, work)
    for name in store.names():
        if name.startswith("model-") and name.endswith(".safetensors") and name not in files:
            store.remove(name)
    for name in beside:
        _copy(open_store(like or ""), store, name)
    set_config_dtype(store, {e.tensor.dtype for exports in files.values() for e in exports})
    if len(files) > 1:
        _write_index(store, files)
    return sum(sizes.values())


def set_config_dtype(store: FileStore, dtypes: Iterable[DType]) -> None:
    """Write the tensors' dtype into a directory's config.json, if there is one, since models are loaded in that dtype.

    If floating-point tensors have several dtypes, it stays as it is.

    Args:
        store: the directory.
        dtypes: those of the tensors.

    Raises:
        InvalidRequest: it is not a JSON object.
        CheckpointError: it could not be read or written.
    """
    floats = {dtype for dtype in dtypes if dtype.is_float}
    if len(floats) != 1 or CONFIG not in store.names():
        return
    with store.open(CONFIG) as file:
        before = file.read(0, file.size)
    config = value_of_json(before, f"{store.uri}/{CONFIG}")
    if not isinstance(config, dict):
        raise InvalidRequest(f"{store.uri}/{CONFIG} is no JSON object")
    _write_dtype(config, floats.pop().torch_name)
    text = json.dumps(config, indent=2).encode() + b"\n"
    if config != value_of_json(before, CONFIG):
        with store.create(CONFIG, len(text)) as sink:
            sink.write(text)


def _write_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype where a config and its parts have it: as `dtype`, or `torch_dtype` before transformers 5."""
    for name, value in config.items():
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            config[name] = dtype
        elif isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            _write_dtype(value, dtype)


def _divided(exports: Sequence[Export], max_file_bytes: int) -> dict[str, list[Export]]:
    """Return the tensors of each file, in their order."""
    groups: list[list[Export]] = [[]]
    size = 0
    for export in exports:
        if groups[-1] and size + export.tensor.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(export)
        size += export.tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_index(store: FileStore, files: dict[str, list[Export]]) -> None:
    total_bytes = sum(e.tensor.nbytes for exports in files.values() for e in exports)
    weight_map = {e.tensor.name: name for name, exports in files.items() for e in exports}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
    with store.create(INDEX, len(text)) as sink:
        sink.write(text)


def _beside(like: FileStore) -> tuple[str, ...]:
    """Return the files of a directory beside its weights.

    Raises:
        InvalidRequest: it has no config.json.
    """
    names = like.names()
    if CONFIG not in names:
        raise InvalidRequest(f"{like.uri} is no directory of a model: it has no config.json")
    return tuple(name for name in names if name.endswith(_BESIDE) and not name.endswith(_WEIGHTS))


def _copy(source: FileStore, target: FileStore, name: str) -> None:
    if source.uri == target.uri:
        return
    with source.open(name) as file:
        if file.size > _MAX_BESIDE_BYTES:
            raise InvalidRequest(f"{source.uri}/{name} has {file.size:,} bytes, which is no config and no tokenizer")
        content = file.read(0, file.size)
    with target.create(name, len(content)) as sink:
        sink.write(content)


__all__ = ["INDEX", "MAX_FILE_BYTES", "SINGLE", "export_directory", "set_config_dtype"]
