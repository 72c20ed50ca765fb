"""The slices of a shard server in a checkpoint: written from live arrays, read back at any server count.

A server writes one safetensors file, of the slices of which it is the primary. Per slice, which begins at element
`begin` of its unit, it holds `{unit}.{begin}.param` f32[n], each moment as `{unit}.{begin}.{name}` f32[n], and
`{unit}.{begin}.updates` i64[parameters of the unit], torch's `step`; for frozen units the first alone. Which file has a
slice is in the manifest.

Reading goes by parameter name (`sharding.plan.moves_into`), so the job that restores may have another number of servers
and other units. Everything that can be wrong with a checkpoint is found in `prepare`, before `load` overwrites values.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Busy, CheckpointCorrupt, CheckpointError, Closed, Misuse
from axon_ps.host.priority import UNTHROTTLED, Throttle
from axon_ps.observe.moments import Moment, reached
from axon_ps.observe.work import Work
from axon_ps.optim import registry
from axon_ps.shard.core.digests import PARAM
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.apply import Pin, VersionPins
from axon_ps.sharding.layout import Layout, Parameter
from axon_ps.sharding.plan import Move, Slice, moves_into
from axon_ps.storage.checkpoint import (
    FileEntry,
    SafetensorsReader,
    SafetensorsWriter,
    TensorSpec,
    check_file,
    create_file,
    open_file,
)
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import Manifest, file_prefix, read_manifest
from axon_ps.types import DType, OptimizerSpec

UPDATES = "updates"


# ---------------------------------------------------------------------- writing


def write(
    engine: ShardEngine,
    uri: str,
    version: int,
    server: int,
    num_servers: int,
    pins: VersionPins,
    pin: Pin,
    throttle: Throttle = UNTHROTTLED,
    work: Work | None = None,
) -> FileEntry:
    """Write the slices of which this server is the primary, as they are at `version`.

    Runs in a thread of its own; see `shard.server.apply`.

    Args:
        engine: whose slices.
        uri: the checkpoint's directory.
        version: the version to write, which `pin` preserves.
        server: our number.
        num_servers: shard servers of the job.
        pins: what makes applies wait for us, slice by slice.
        pin: ours.
        throttle: of the writing.
        work: counts its bytes.

    Raises:
        Misuse: there are no values yet.
        Closed: the server stops.
        StorageFull: no space left; nothing of the file remains.
        CheckpointError: it could not be written; nothing of the file remains.
    """
    if not engine.parameters.initialized:
        raise Misuse("this shard server holds no parameters yet; there is nothing to save")
    slices = engine.slices.primaries
    states = {owned.number: list(owned.master.moments.arrays) for owned in slices}
    tensors = [t for owned in slices for t in _tensors(owned, states[owned.number])]
    name = f"{file_prefix(server, num_servers)}v{version}-{secrets.token_hex(4)}.safetensors"
    metadata = {"format": "axon_ps", "server": str(server), "num_servers": str(num_servers), "version": str(version)}
    with create_file(open_store(uri), name, tensors, metadata, throttle, work) as writer:
        for owned in slices:
            if not pins.wait_until(lambda s=owned: s.reached >= version):  # type: ignore[misc]
                raise Closed("the shard server stops; the checkpoint is not written")
            owned.check(0, len(owned.chunks.bounds))
            if owned.corruptions or owned.corrupt:
                raise CheckpointError(f"slice {owned.number} is corrupt; another checkpoint can be written soon")
            _write_slice(writer, owned, states[owned.number])
            reached(Moment.CHECKPOINT, version)
            pins.advance(pin, owned.number)
    return writer.entry(name)


def tensor_name(unit: int, begin: int, name: str = PARAM) -> str:
    """What a tensor of the slice that begins at an element of a unit is called in a file."""
    return f"{unit}.{begin}.{name}"


def _tensors(owned: OwnedSlice, states: list[str]) -> Iterator[TensorSpec]:
    unit, begin = owned.chunks.unit, owned.chunks.begin
    for name in (PARAM, *states):
        yield TensorSpec(name=tensor_name(unit, begin, name), dtype=DType.F32, shape=(owned.chunks.numel,))
    if owned.trainable:
        shape = (len(owned.master.parameter_updates()),)
        yield TensorSpec(name=tensor_name(unit, begin, UPDATES), dtype=DType.I64, shape=shape)


def _write_slice(writer: SafetensorsWriter, owned: OwnedSlice, states: list[str]) -> None:
    unit, begin = owned.chunks.unit, owned.chunks.begin
    writer.write(tensor_name(unit, begin), owned.master.values)
    moments = owned.master.moments
    for name in states:
        writer.write(tensor_name(unit, begin, name), moments.arrays[name])
    if owned.trainable:
        writer.write(tensor_name(unit, begin, UPDATES), np.array(moments.updates, np.int64))


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True)
class Restore:
    """A checkpoint that fits: what `load` does.

    Attributes:
        manifest: of the checkpoint.
        moves: by the number of a slice, where its values come from.
        files: the files of the checkpoint that are needed, by their place in the manifest.
    """

    manifest: Manifest
    moves: Mapping[int, tuple[Move, ...]]
    files: tuple[int, ...]

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose moments the checkpoint has; None when it has none."""
        return self.manifest.optimizer


def prepare(
    engine: ShardEngine, uri: str, version: int, section: str = "", work: Work | None = None, *, sha256: str = ""
) -> Restore:
    """Check that a checkpoint is complete and fits the layout; changes nothing.

    Args:
        engine: whose slices.
        uri: the checkpoint.
        version: the version it must hold.
        section: what the checkpoint calls the model; empty = the only one in it.
        work: gets the bytes to read, here and in `load`, and those that were.
        sha256: the hash of the manifest that was checked; empty = any.

    Raises:
        Misuse: no layout is registered yet.
        InvalidRequest: it lacks the model or a parameter of it, or has it in another shape.
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: a file that we need is missing, truncated or altered, or it is of another version.
        CheckpointError: a file could not be read.
    """
    if engine.spec is None:
        raise Misuse("this shard server has no layout yet; register the job's spec before restoring")
    found = read_manifest(uri)
    if sha256 and found.sha256 != sha256:
        raise CheckpointCorrupt(f"the manifest at {uri} is not the one that the coordinator has checked")
    manifest = found.section(section, only=not section)
    if manifest.version != version:
        raise CheckpointCorrupt(
            f"the checkpoint at {uri} is of version {manifest.version}; version {version} was ordered"
        )
    layout = engine.spec.layout
    moves = {
        number: moves_into(
            Slice(unit=s.chunks.unit, server=0, begin=s.chunks.begin, end=s.chunks.end), layout, manifest.layout
        )
        for number, s in engine.slices.copy().items()  # this is a thread, and the placement may change meanwhile
    }
    slices = manifest.plan.slices
    files = {
        manifest.file_of(s)
        for m in moves.values()
        for move in m
        for s, _, _ in _overlaps(move, slices[move.source_unit])
    }
    if work is not None:
        numel = sum(owned.chunks.numel for owned in engine.slices.values())
        work.total_bytes += sum(manifest.files[f].bytes for f in files) + 4 * numel
    for file in sorted(files):
        check_file(open_store(manifest.uri), manifest.files[file], work=work)
    return Restore(manifest=manifest, moves=moves, files=tuple(sorted(files)))


def load(engine: ShardEngine, restore: Restore, work: Work | None = None) -> None:
    """Fill the slices from a prepared checkpoint and encode their frames. In a thread; nothing is applied meanwhile.

    Raises:
        CheckpointError: a file could not be read after all; the slices hold anything.
        Busy: a slice came after the checkpoint was prepared; the slices hold anything.
    """
    assert engine.spec is not None
    store = open_store(restore.manifest.uri)
    with ExitStack() as files:
        names = {file: restore.manifest.files[file].name for file in restore.files}
        readers = {file: files.enter_context(open_file(store, name)) for file, name in names.items()}
        loader = _Loader(readers, restore.manifest, engine.spec.layout)
        for number, owned in engine.slices.copy().items():
            if number not in restore.moves:
                if owned.copying:  # its primary has the values
                    continue
                raise Busy(f"slice {number} came while {restore.manifest.uri} was being read; restore it again")
            loader.fill(owned, restore.moves[number])
            reached(Moment.RESTORE, restore.manifest.version)
            owned.publish(restore.manifest.version)
            if work is not None:
                work.advance(4 * owned.chunks.numel)


class _Loader:
    """Fills slices from the files of a checkpoint.

    Args:
        readers: by their place in the manifest, its files.
        manifest: of the checkpoint.
        layout: of the job that restores.
    """

    def __init__(self, readers: Mapping[int, SafetensorsReader], manifest: Manifest, layout: Layout) -> None:
        self._readers = readers
        self._layout = layout
        self._manifest = manifest
        self._old = manifest.layout
        self._old_slices = manifest.plan.slices
        self._home: dict[str, tuple[int, int, Parameter]] = {}
        for u, unit in enumerate(manifest.layout.units):
            for i, p in enumerate(unit.parameters):
                for name in (p.name, *p.aliases):
                    self._home[name] = u, i, p
        self._initial = _initial_states(manifest)

    def fill(self, owned: OwnedSlice, moves: tuple[Move, ...]) -> None:
        """Parameters, moments and update counts of one slice."""
        if owned.trainable:
            present, owned.master.state = owned.master.state, {}
            for name, value in self._initial.items():
                array = present.pop(name, None)
                owned.master.state[name] = np.empty(owned.chunks.numel, np.float32) if array is None else array
                owned.master.state[name].fill(value)
            owned.master.set_updates(self._updates(owned))
        for move in moves:
            for old, begin, end in _overlaps(move, self._old_slices[move.source_unit]):
                self._copy(owned, move, old, begin, end)

    def _copy(self, owned: OwnedSlice, move: Move, old: Slice, begin: int, end: int) -> None:
        """Copy elements [begin, end) of the old unit, which lie in its slice `old`."""
        reader = self._readers[self._manifest.file_of(old)]
        first = move.begin + begin - move.source_begin - owned.chunks.begin
        target = slice(first, first + end - begin)
        reader.read_into(tensor_name(old.unit, old.begin), begin - old.begin, owned.master.values[target])
        if owned.trainable and self._old.units[old.unit].trainable:
            for name, array in owned.master.state.items():
                if (tensor := tensor_name(old.unit, old.begin, name)) in reader.tensors:
                    reader.read_into(tensor, begin - old.begin, array[target])

    def _updates(self, owned: OwnedSlice) -> list[int]:
        """Per parameter of the slice's unit, its update count; 0 for those that lie outside the slice."""
        updates: list[int] = []
        for p in self._layout.units[owned.chunks.unit].parameters:
            u, index, q = self._home[p.name]
            begin = max(p.offset, owned.chunks.begin)
            if begin >= min(p.end, owned.chunks.end) or not self._old.units[u].trainable:
                updates.append(0)
                continue
            element = q.offset + begin - p.offset
            old = next(s for s in self._old_slices[u] if s.begin <= element < s.end)
            count = np.zeros(1, np.int64)
            self._readers[self._manifest.file_of(old)].read_into(tensor_name(u, old.begin, UPDATES), index, count)
            updates.append(int(count[0]))
        return updates


def _initial_states(manifest: Manifest) -> dict[str, float]:
    """The moments of the checkpoint's optimizer, and the value of each where there is none yet."""
    if manifest.optimizer is None:
        return {}
    kernels = registry.create(manifest.optimizer.name)
    groups = tuple(kernels.validate(g) for g in (*manifest.optimizer.groups, *manifest.optimizer.moments))
    return {name: kernels.initial_state(name, groups) for name in kernels.state_names(groups)}


def _overlaps(move: Move, slices: tuple[Slice, ...]) -> Iterator[tuple[Slice, int, int]]:
    """The old slices that a move reads from, each with the range it gives."""
    for s in slices:
        begin, end = max(move.source_begin, s.begin), min(move.source_begin + move.numel, s.end)
        if begin < end:
            yield s, begin, end
