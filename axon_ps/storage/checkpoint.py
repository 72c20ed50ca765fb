"""safetensors files, written as a stream and read in ranges, with bounded memory and a hash on the way.

The format (huggingface/safetensors) is eight bytes with the length of the header, the header in JSON (per tensor its
dtype, shape and offset in the data), and the data of all tensors without gaps. The header comes first, so shapes must
be known before the first value. Values then come in the order of the header, straight from live arrays.

Ranges of a tensor are read by offset, not mapped: this works for local files and object stores alike, and a damaged
file causes an error where a mapping would cause a signal. Any safetensors library reads these files (there is a test).

An open file has been checked: it has the size and the hash of the manifest, its header is within bounds, and its
tensors lie one behind the other, without overlap or gap, to the end of the file. It is opened once, so it cannot be
exchanged in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axon_ps.errors import CheckpointCorrupt, CheckpointNotFound, InternalError, InvalidRequest
from axon_ps.host.priority import UNTHROTTLED, Throttle
from axon_ps.observe.work import LongWork
from axon_ps.storage.files import FileStore, OpenFile, Sink
from axon_ps.storage.writer_thread import WriterThread
from axon_ps.texts import check_values_of_json, value_of_json
from axon_ps.types import ELEMENTS, Array, DType
from axon_ps.wire.codec import MAX_DIMENSIONS, MAX_LAYOUT_NUMEL, MAX_NAME_CHARS

BLOCK_BYTES = 4 << 20
"""Bytes that are read at a time."""

_MAX_HEADER_BYTES = 100_000_000
"""Longest header: the limit of the safetensors library."""

_MAX_WHY = 300
"""Most characters of a message that come from a file."""

_DTYPE_NAMES: dict[DType, str] = {
    dtype: dtype.value.upper() for dtype in ELEMENTS if dtype not in (DType.F4_X2, DType.C32, DType.C128)
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of a file, without its values."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint: its name, the SHA-256 of its content in hex, and its size."""

    name: str
    sha256: str
    bytes: int


class SafetensorsWriter:
    """Writes the values of one file's tensors, in the order of the header. Made by `create_file`.

    See Note: [Copied, then written] of `writer_thread`.
    """

    def __init__(
        self, sink: Sink, tensors: Sequence[TensorSpec], metadata: Mapping[str, str], throttle: Throttle
    ) -> None:
        self._thread = WriterThread(sink, throttle)
        self._written = ("", 0)
        self._left = [(t.name, t.nbytes) for t in reversed(tensors)]
        self._missing = 0
        self._thread.put(_header(tensors, metadata))

    def write(self, name: str, values: Array) -> None:
        """Write all values of tensor `name`, or the next of them: a contiguous array in the tensor's storage dtype.

        They are copied, and may change when this returns.

        Raises:
            OSError: a local file could not be written. `create_file` raises a `CheckpointError` in its place.
            StorageFull: no space left.
            CheckpointError: the file could not be written.
        """
        view = _bytes_of(np.ascontiguousarray(values))
        if not self._missing:
            expected, self._missing = self._left.pop() if self._left else ("nothing", 0)
            if expected != name:
                raise InternalError(f"{name} is written where the file's header has {expected}")
        if len(view) > self._missing:
            raise InternalError(f"{name} has {len(view)} bytes where the file's header leaves {self._missing}")
        self._thread.put(view)
        self._missing -= len(view)

    def finish(self, name: str) -> None:
        """Wait until everything is written.

        Raises:
            OSError: as of `write`.
            StorageFull: no space left.
            CheckpointError: the file could not be written.
        """
        if self._left or self._missing:
            raise InternalError(f"{name} ends before its last tensor")
        self._written = self._thread.finish()

    def abandon(self) -> None:
        """Stop writing."""
        self._thread.abandon()

    def entry(self, name: str) -> FileEntry:
        """Return name, size and hash of the file, once it is written."""
        sha256, size = self._written
        return FileEntry(name=name, sha256=sha256, bytes=size)


@contextlib.contextmanager
def create_file(
    store: FileStore,
    name: str,
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    throttle: Throttle = UNTHROTTLED,
    work: LongWork | None = None,
) -> Iterator[SafetensorsWriter]:
    """Write a safetensors file. It is complete once the context ends without an error. See `FileStore.create`.

    Args:
        store: its directory.
        name: its name.
        tensors: names, dtypes and shapes, in the order of their values.
        metadata: strings stored in the header.
        throttle: of the writing.
        work: gets the size of the file as bytes to do, and the bytes that storage has taken as done.
    """
    size_bytes = len(_header(tensors, metadata)) + sum(t.nbytes for t in tensors)
    if work is not None:
        work.total_bytes += size_bytes
    with store.create(name, size_bytes) as sink:
        counted = sink if work is None else _CountedSink(sink, work)
        writer = SafetensorsWriter(counted, tensors, metadata, throttle)
        try:
            yield writer
            writer.finish(name)
        except BaseException:
            writer.abandon()
            raise


class _CountedSink:
    """A sink whose bytes are counted when they are written."""

    def __init__(self, sink: Sink, work: LongWork) -> None:
        self._sink, self._work = sink, work

    def write(self, data: Any, /) -> None:
        """See `Sink.write`."""
        self._sink.write(data)
        self._work.advance(len(data))


class SafetensorsReader:
    """An open safetensors file. Made by `open_checked`.

    Attributes:
        name: the file, for messages.
        metadata: the header's strings.
        tensors: per name, dtype and shape.
    """

    def __init__(self, source: OpenFile, name: str) -> None:
        self._source = source
        self.name = name
        self._offsets: dict[str, int] = {}
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorSpec] = {}
        length = int.from_bytes(source.read(0, 8), "little")
        if source.size < 8 or length > min(_MAX_HEADER_BYTES, source.size - 8):
            raise CheckpointCorrupt(
                f"{name} is no safetensors file: its {source.size} bytes hold no header of {length}"
            )
        try:
            header = value_of_json(source.read(8, length), "it", max_bytes=_MAX_HEADER_BYTES)
            self.metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            ranges = {tensor: self._add(tensor, fields, 8 + length) for tensor, fields in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointCorrupt(f"the header of {name} is damaged: {described(error)}") from error
        self._check_order(ranges, source.size - 8 - length)

    def read_into(self, name: str, begin: int, out: Array) -> None:
        """Fill `out` (contiguous, in the tensor's storage dtype) with the tensor's elements from `begin` on.

        Raises:
            CheckpointCorrupt: the file has no such tensor or range, or ends early.
            CheckpointError: it could not be read.
        """
        spec = self.tensors.get(name)
        if spec is None:
            raise CheckpointCorrupt(f"{self.name} has no tensor {name!r}; it belongs to another checkpoint or version")
        numel = math.prod(spec.shape)
        if spec.dtype.numpy != out.dtype or begin + out.size > numel:
            raise CheckpointCorrupt(
                f"tensor {name!r} of {self.name} has {numel} elements of {spec.dtype.value}; needed are those "
                f"from {begin} to {begin + out.size}, as {out.dtype}"
            )
        view = _bytes_of(out)
        offset = self._offsets[name] + begin * spec.dtype.itemsize
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            if (got := self._source.read_into(offset + start, block)) != len(block):
                raise CheckpointCorrupt(f"{self.name} ends {len(block) - got} bytes too early, in tensor {name!r}")

    def _add(self, name: str, fields: Any, data_begin: int) -> tuple[int, int]:
        """Take a tensor of the header; returns its beginning and end in the data."""
        dtype, shape = _DTYPES[fields["dtype"]], tuple(_count(d) for d in fields["shape"])
        if len(name) > MAX_NAME_CHARS or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name[:80]!r} has {len(name)} characters and {len(shape)} dimensions")
        if math.prod(max(d, 1) for d in shape) > MAX_LAYOUT_NUMEL:
            raise ValueError(f"tensor {name[:80]!r} has more elements than a model may have, {MAX_LAYOUT_NUMEL}")
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        begin, end = (_count(x) for x in fields["data_offsets"])
        if end - begin != spec.nbytes or data_begin + end > self._source.size:
            raise CheckpointCorrupt(
                f"{self.name}: tensor {name[:80]!r} of {spec.nbytes} bytes is said to lie at bytes {begin} to {end} of "
                f"the data; the file has {self._source.size - data_begin}"
            )
        self.tensors[name] = spec
        self._offsets[name] = data_begin + begin
        return begin, end

    def _check_order(self, ranges: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
        """Refuse tensors that overlap, and bytes that belong to no tensor."""
        behind = 0
        for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
            if begin != behind:
                raise CheckpointCorrupt(
                    f"{self.name}: tensor {name[:80]!r} begins at byte {begin} of the data, and the one before it ends "
                    f"at {behind}; tensors lie one behind the other"
                )
            behind = end
        if behind != data_bytes:
            raise CheckpointCorrupt(
                f"{self.name} has {data_bytes} bytes of data, and its tensors end at {behind}; there is nothing behind"
            )


def check_size(store: FileStore, entry: FileEntry) -> None:
    """Compare a file's size with its manifest.

    Raises:
        CheckpointCorrupt: it is missing, or of another size.
        CheckpointError: it could not be opened.
    """
    with sized(store, entry):
        pass


@contextlib.contextmanager
def sized(store: FileStore, entry: FileEntry) -> Iterator[OpenFile]:
    """Open a file. It must have the size given by its manifest.

    Raises:
        CheckpointCorrupt: it is missing, or of another size.
        CheckpointError: it could not be opened.
    """
    try:
        with store.open(entry.name) as source:
            if source.size != entry.bytes:
                raise CheckpointCorrupt(
                    f"{store.uri}/{entry.name} has {source.size} bytes; the manifest says {entry.bytes}: it is "
                    "truncated or was replaced"
                )
            yield source
    except CheckpointNotFound as error:
        raise CheckpointCorrupt(f"{store.uri} lacks the file {entry.name}, which its manifest names") from error


@contextlib.contextmanager
def open_checked(
    store: FileStore, entry: FileEntry, throttle: Throttle = UNTHROTTLED, work: LongWork | None = None
) -> Iterator[SafetensorsReader]:
    """Open a safetensors file and check it against its manifest. `work` is advanced by the bytes read for that.

    Raises:
        CheckpointCorrupt: it is missing, of another size, of another content, or not a safetensors file.
        CheckpointError: it could not be read.
    """
    with sized(store, entry) as source:
        digest = hashlib.sha256()
        for begin in range(0, source.size, BLOCK_BYTES):
            began_s = time.monotonic()
            digest.update(block := source.read(begin, BLOCK_BYTES))
            if work is not None:
                work.advance(len(block))
            throttle.rest(time.monotonic() - began_s)
        if digest.hexdigest() != entry.sha256:
            raise CheckpointCorrupt(
                f"{store.uri}/{entry.name} has SHA-256 {digest.hexdigest()}; the manifest says {entry.sha256}: "
                "it was altered"
            )
        yield SafetensorsReader(source, f"{store.uri}/{entry.name}")


def described(error: Exception) -> str:
    """Return the text of an error about a file's content, shortened to fit into a message."""
    text = str(error) if isinstance(error, InvalidRequest) else repr(error)
    return text if len(text) <= _MAX_WHY else f"{text[:_MAX_WHY]}..."


def _header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    if len({t.name for t in tensors}) != len(tensors):
        raise InvalidRequest("two tensors of a file share a name")
    if unnamed := next((t for t in tensors if t.dtype not in _DTYPE_NAMES), None):
        raise InvalidRequest(f"tensor {unnamed.name!r} is of {unnamed.dtype.torch_name}, which safetensors has not")
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for t in tensors:
        fields[t.name] = {
            "dtype": _DTYPE_NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, offset + t.nbytes],
        }
        offset += t.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    check_values_of_json(text, "the header of a file")  # or it could not be read again
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: Array) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
