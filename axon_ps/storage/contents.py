"""The files that a manifest names: their content, and the only way to read values from them.

A shard server writes one safetensors file of each model, with the slices of which it is the primary. Each slice has
these tensors. A slice of a frozen unit has only the first. `begin` is the slice's first element in its unit:

    {unit}.{begin}.param      f32[n]
    {unit}.{begin}.{name}     f32[n], for each moment
    {unit}.{begin}.updates    i64[parameters of the unit], torch's `step`

A model's attached buffers and a worker's own state are safetensors files, too.

Note: [Checked, then read]
    A file is first compared with the size and hash in the manifest, then with the content that the manifest describes:
    every slice is there, each tensor is as long as its slice, and every count is in its range. Only then is there an
    object to read values from, and from then on only the storage can fail. So a process that overwrites something with
    a checkpoint opens that first, and gets all other errors here. `verify` opens all of it, and returns no values.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, deserialize

from axon_ps.errors import CheckpointCorrupt, InvalidRequest
from axon_ps.host.priority import UNTHROTTLED, Throttle
from axon_ps.observe.work import LongWork
from axon_ps.sharding import raw
from axon_ps.sharding.layout import Parameter
from axon_ps.sharding.moves import Move
from axon_ps.sharding.plan import Slice
from axon_ps.storage.checkpoint import FileEntry, SafetensorsReader, open_checked, sized
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import MAX_STATE_BYTES, MAX_VERSION, Manifest, read_manifest
from axon_ps.texts import value_of_json
from axon_ps.types import BUFFERS, Array, DType

PARAM: Final = "param"
UPDATES: Final = "updates"

TREE: Final = "tree"
"""The tensor of a worker's own state that has its JSON: u8[bytes]."""


BLOCK_NUMEL: Final = 1 << 20
"""Most elements that are read at once of what is copied run by run."""

_GAP_NUMEL: Final = 1 << 14
"""Elements between two runs, up to which they are read together: this many cost as much as a call."""


def tensor_name(unit: int, begin: int, name: str = PARAM) -> str:
    """Return the name in a file of a tensor of the slice that begins at an element of a unit."""
    return f"{unit}.{begin}.{name}"


# ---------------------------------------------------------------------- slices


class OpenSlices:
    """Slices of a model in open files; see Note: [Checked, then read]. Made by `open_slices`; `close` it.

    Attributes:
        manifest: the section of the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files = ExitStack()
        self._readers: dict[int, SafetensorsReader] = {}
        self._updates: dict[Slice, tuple[int, ...]] = {}

    def __enter__(self) -> OpenSlices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. A repeated call is harmless."""
        self._files.close()

    def updates(self, s: Slice) -> tuple[int, ...]:
        """Return the number of updates of each parameter of a slice's unit, which must be trainable."""
        return self._updates[s]

    def updates_in(self, move: Move) -> int:
        """Return the number of updates of the parameter that a move begins to read from; 0 if it was frozen."""
        unit = self.manifest.layout.units[move.source_unit]
        if not unit.trainable:
            return 0
        s, _ = next(cuts_of(self.manifest, move))
        return self.updates(s)[bisect_right(unit.parameters, move.source_begin, key=lambda p: p.offset) - 1]

    def read_into(self, s: Slice, begin: int, out: Array, name: str = PARAM) -> bool:
        """Fill `out`, f32[m], with the parameters or a moment of a slice, from an element of its unit on.

        Returns:
            False if the slice has no such moment.

        Raises:
            CheckpointError: it could not be read.
        """
        reader, tensor = self._readers[self.manifest.file_of(s)], tensor_name(s.unit, s.begin, name)
        if tensor not in reader.tensors:
            return False
        reader.read_into(tensor, begin - s.begin, out)
        return True

    def copy(self, move: Move, out: Array, begin: int, name: str = PARAM) -> None:
        """Copy what a move brings of the parameters or of a moment. What has no such moment stays as it is.

        Args:
            move: from this checkpoint's layout.
            out: f32[m], a part of the unit that it leads to.
            begin: the element of that unit with which `out` begins.
            name: the moment.

        Raises:
            CheckpointError: it could not be read.
        """
        if move.converts is not None:
            self._convert(move, *move.converts, out, begin)
            return
        for s, cut in cuts_of(self.manifest, move):
            near = cut.source_step - cut.numel <= _GAP_NUMEL
            together = max(1, (BLOCK_NUMEL - cut.numel) // cut.source_step + 1) if cut.rows > 1 and near else 1
            for first in range(0, cut.rows, together):
                rows = min(together, cut.rows - first)
                at, source = cut.begin - begin + first * cut.step, cut.source_begin + first * cut.source_step
                if rows == 1:
                    self.read_into(s, source, out[at : at + cut.numel], name)
                    continue
                values = np.empty((rows - 1) * cut.source_step + cut.numel, np.float32)
                if self.read_into(s, source, values, name):
                    runs = _runs(values, cut.source_step, rows, cut.numel)
                    _runs(out[at:], cut.step, rows, cut.numel)[:] = runs

    def _convert(self, move: Move, source: Parameter, target: Parameter, out: Array, begin: int) -> None:
        """Copy elements of a parameter that is raw here or there, run by run."""
        for row, first in itertools.product(range(move.rows), range(0, move.numel, BLOCK_NUMEL)):
            at = move.source_begin + row * move.source_step + first
            last = at + min(BLOCK_NUMEL, move.numel - first)
            low, high = raw.range_with(source, at, last)
            values = np.empty(high - low, np.float32)
            run = Move(
                source_unit=move.source_unit, source_begin=source.offset + low, unit=0, begin=0, numel=high - low
            )
            self.copy(run, values, 0)
            found = raw.stored(values, source, low, at, last, target)
            raw.put(found, target, move.begin + row * move.step + first, out, begin)

    def open(self, file: int, slices: Collection[Slice], throttle: Throttle, work: LongWork | None) -> None:
        """Open one of the manifest's files, and check these slices in it.

        Raises: as of `open_slices`.
        """
        store, entry = open_store(self.manifest.uri), self.manifest.files[file]
        reader = self._readers[file] = self._files.enter_context(open_checked(store, entry, throttle, work))
        names: defaultdict[str, list[str]] = defaultdict(list)  # by the beginning of their names, the tensors
        for tensor in reader.tensors:
            names[tensor.rpartition(".")[0]].append(tensor)
        for s in slices:
            unit = self.manifest.layout.units[s.unit]
            count = len(unit.parameters) if unit.trainable else None
            of_slice = names[f"{s.unit}.{s.begin}"]
            if count is not None:
                of_slice.append(tensor_name(s.unit, s.begin, UPDATES))
            for tensor in (tensor_name(s.unit, s.begin), *of_slice):
                _check_tensor(reader, tensor, s.numel, count)
            if count is not None:
                self._updates[s] = _updates(reader, tensor_name(s.unit, s.begin, UPDATES), count)


def _runs(values: Array, step: int, rows: int, numel: int) -> Array:
    """Return a view of runs of elements at equal distances, as rows."""
    assert (rows - 1) * step + numel <= len(values), "all runs are inside"
    return np.lib.stride_tricks.as_strided(values, (rows, numel), (step * values.itemsize, values.itemsize))


def slices_of(manifest: Manifest, move: Move) -> Iterator[Slice]:
    """Yield the slices of a manifest's plan that a move reads from."""
    begin, end = move.source_range
    slices = manifest.plan.slices[move.source_unit]
    first = bisect_right(manifest.plan.ends_of[move.source_unit], begin)
    for s in itertools.takewhile(lambda s: s.begin < end, slices[first:]):
        if move.converts is not None or any(True for _ in move.read_from(s.begin, s.end)):
            yield s


def cuts_of(manifest: Manifest, move: Move) -> Iterator[tuple[Slice, Move]]:
    """Yield the slices that a move without conversion reads from, each with the parts that are read from it."""
    for s in slices_of(manifest, move):
        for cut in move.read_from(s.begin, s.end):
            yield s, cut


def open_slices(
    manifest: Manifest, slices: Collection[Slice], throttle: Throttle = UNTHROTTLED, work: LongWork | None = None
) -> OpenSlices:
    """Open the files that have slices of the manifest's plan. `work` is advanced by the size of those files.

    Raises:
        CheckpointCorrupt: a file is missing, truncated, altered, or is not what the manifest says.
        CheckpointError: one could not be read.
    """
    opened = OpenSlices(manifest)
    try:
        for file, of_file in by_file(manifest, slices).items():
            opened.open(file, of_file, throttle, work)
    except BaseException:
        opened.close()
        raise
    return opened


def by_file(manifest: Manifest, slices: Collection[Slice]) -> dict[int, list[Slice]]:
    """Group slices of the manifest's plan by the file that has them, ascending."""
    found: defaultdict[int, list[Slice]] = defaultdict(list)
    for s in slices:
        found[manifest.file_of(s)].append(s)
    return dict(sorted(found.items()))


def _check_tensor(reader: SafetensorsReader, tensor: str, numel: int, parameters: int | None) -> None:
    """Check dtype and shape of a slice's tensor. `parameters` is the number of them in its unit, None if frozen."""
    spec = reader.tensors.get(tensor)
    if spec is None:
        raise CheckpointCorrupt(f"{reader.name} lacks the tensor {tensor!r}, which its manifest says is in it")
    counts = tensor.endswith(f".{UPDATES}")
    if counts and parameters is None:
        return  # it is never read
    dtype, length = (DType.I64, parameters) if counts else (DType.F32, numel)
    if (spec.dtype, spec.shape) != (dtype, (length,)):
        raise CheckpointCorrupt(
            f"tensor {tensor!r} of {reader.name} is {spec.dtype.value}{list(spec.shape)}; by its manifest it must be "
            f"{dtype.value}[{length}]"
        )


def _updates(reader: SafetensorsReader, tensor: str, count: int) -> tuple[int, ...]:
    counts = np.zeros(count, np.int64)
    reader.read_into(tensor, 0, counts)
    if ((counts < 0) | (counts > MAX_VERSION)).any():
        wrong = int(counts[(counts < 0) | (counts > MAX_VERSION)][0])
        raise CheckpointCorrupt(
            f"tensor {tensor!r} of {reader.name} counts {wrong} updates of a parameter; it must be 0 to {MAX_VERSION}"
        )
    return tuple(counts.tolist())


# ---------------------------------------------------------------------- attached files, and workers' own state


def read_attached(manifest: Manifest, key: str) -> bytes:
    """Return the content attached under a key, which must exist. Buffers are checked to be a safetensors file.

    Raises:
        CheckpointCorrupt: it is missing, truncated, altered or not a safetensors file.
        CheckpointError: it could not be read.
    """
    store, entry = open_store(manifest.uri), manifest.attached[key]
    with sized(store, entry) as source:
        content = source.read(0, entry.bytes)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointCorrupt(f"{store.uri}/{entry.name} was altered: it is not what the manifest says")
    if key.startswith(BUFFERS):
        try:
            deserialize(content)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise CheckpointCorrupt(f"the buffers in {store.uri}/{entry.name} are damaged: {error!s:.300}") from error
    return content


@contextlib.contextmanager
def open_state(
    uri: str, entry: FileEntry, throttle: Throttle = UNTHROTTLED, work: LongWork | None = None
) -> Iterator[tuple[SafetensorsReader, Mapping[str, Any]]]:
    """Open the file of a worker's own state; gives a reader of it and its JSON, an object.

    Raises:
        CheckpointCorrupt: it is missing, truncated, altered, or has no such JSON.
        CheckpointError: it could not be read.
    """
    with open_checked(open_store(uri), entry, throttle, work) as reader:
        spec = reader.tensors.get(TREE)
        if spec is None or spec.dtype is not DType.U8 or spec.nbytes > MAX_STATE_BYTES:
            raise CheckpointCorrupt(f"{reader.name} is no worker's state: it has no bytes called {TREE!r}")
        text = np.empty(spec.nbytes, np.uint8)
        reader.read_into(TREE, 0, text)
        try:
            tree = value_of_json(text.tobytes(), "its text", max_bytes=MAX_STATE_BYTES)
        except InvalidRequest as error:
            raise CheckpointCorrupt(f"{reader.name} is damaged: {error}") from error
        if not isinstance(tree, dict):
            raise CheckpointCorrupt(f"{reader.name} is damaged: its JSON is no object")
        yield reader, tree


# ---------------------------------------------------------------------- all of it


def verify(uri: str, throttle: Throttle = UNTHROTTLED, work: LongWork | None = None) -> Manifest:
    """Read every file of a checkpoint, throttled or not, and compare it with the manifest.

    Args:
        uri: the checkpoint, or a directory of checkpoints (the newest complete one is taken).
        throttle: of the reading.
        work: gets the bytes to read, and those that were read.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: a file is missing, truncated or altered, or its content is not what the manifest says. The
            message says which, and what was expected.
        CheckpointError: a file could not be read.
    """
    manifest = read_manifest(uri)
    verify_files(manifest, throttle, work)
    return manifest


def verify_files(manifest: Manifest, throttle: Throttle = UNTHROTTLED, work: LongWork | None = None) -> None:
    """Verify the files of a manifest that was read already; see `verify`.

    Raises:
        CheckpointCorrupt: a file is missing, truncated or altered, or its content is not what the manifest says.
        CheckpointError: a file could not be read.
    """
    if work is not None:
        work.total_bytes += manifest.bytes
    for section in manifest.sections:
        slices = by_file(section, section.plan.numbered)
        for file in range(len(section.files)):
            with OpenSlices(section) as opened:
                opened.open(file, slices.get(file, ()), throttle, work)
    for key, entry in manifest.attached.items():
        read_attached(manifest, key)
        if work is not None:
            work.advance(entry.bytes)
    for entry in manifest.states.values():
        with open_state(manifest.uri, entry, throttle, work):
            pass
