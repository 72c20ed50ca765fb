"""The slices of a shard server in a checkpoint: written from live arrays, read back at any server count.

A server writes one safetensors file per model, with the slices of which it is the primary. Its format is in
`storage.contents`. The manifest names the file of each slice.

Reading goes by the tensors' names (`sharding.moves`), so the job that restores may have another number of servers,
other units, and tensors cut into other boxes. Everything wrong with a checkpoint is found in `prepare`, before `load`
overwrites values. `load` reads from the files that `prepare` has opened and checked, so only their storage can still
fail.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Busy, CheckpointCorrupt, CheckpointError, Closed, Misuse
from axon_ps.host.priority import UNTHROTTLED, Throttle
from axon_ps.observe.moments import Moment, reached
from axon_ps.observe.work import LongWork
from axon_ps.optim import registry
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.apply import Pin, VersionPins
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.moves import Move, TensorSources
from axon_ps.sharding.plan import Slice
from axon_ps.storage.checkpoint import FileEntry, SafetensorsWriter, TensorSpec, create_file
from axon_ps.storage.contents import PARAM, UPDATES, OpenSlices, open_slices, slices_of, tensor_name
from axon_ps.storage.files import open_store
from axon_ps.storage.manifest import Manifest, file_prefix, read_manifest
from axon_ps.types import DType, OptimizerSpec

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
    work: LongWork | None = None,
) -> FileEntry:
    """Write the slices of which this server is the primary, as they are at `version`.

    It runs in the files' thread; see `shard.server.apply`.

    Args:
        engine: the engine that has the slices.
        uri: the checkpoint's directory.
        version: the version to write, which `pin` preserves.
        server: this server's number.
        num_servers: number of servers that the plan cuts units over.
        pins: the pins, by which this snapshot holds up applies slice by slice.
        pin: the pin of this snapshot.
        throttle: the limit of the writing rate.
        work: counts its bytes.

    Raises:
        Misuse: there are no values yet.
        Closed: the server stops.
        StorageFull: no space left. Nothing of the file remains.
        CheckpointError: it could not be written, or a slice is corrupt. Nothing of the file remains.
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
    """A checkpoint that is complete and fits the layout, prepared for `load`. `close` must follow.

    Attributes:
        source: the slices of the checkpoint that are needed, open.
        moves: the sources of each slice's values, by its number.
        updates: per parameter of the unit, its update count, by the number of a slice of a trainable unit; 0 for
            parameters outside the slice.
        initial: the initial value of each moment of the checkpoint's optimizer.
    """

    source: OpenSlices
    moves: Mapping[int, tuple[Move, ...]]
    updates: Mapping[int, Sequence[int]]
    initial: Mapping[str, float]

    @property
    def manifest(self) -> Manifest:
        """The section of the model."""
        return self.source.manifest

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose moments the checkpoint has; None when it has none."""
        return self.manifest.optimizer

    def close(self) -> None:
        """Close the files. A repeated call is harmless."""
        self.source.close()

    def check_slices(self, engine: ShardEngine) -> None:
        """Check that no slice was added after the checkpoint was prepared, except copies from a primary.

        Raises:
            Busy: there is one.
        """
        for number, owned in engine.slices.copy().items():
            if number not in self.moves and not owned.copying:
                raise Busy(f"slice {number} came while {self.manifest.uri} was being read; restore it again")


def prepare(
    engine: ShardEngine, uri: str, version: int, section: str = "", work: LongWork | None = None, *, sha256: str = ""
) -> Restore:
    """Read the parts of a checkpoint that a server needs, and check that it is complete and fits; changes nothing.

    Args:
        engine: the engine that has the slices.
        uri: the checkpoint.
        version: the version it must hold.
        section: name of the model in the checkpoint; empty = the only one in it.
        work: counts the bytes to read and those read, here and in `load`.
        sha256: the hash of the manifest that was checked; empty = any.

    Raises:
        Misuse: no layout is registered yet.
        InvalidRequest: it lacks the model or one of its parameters, has one in another shape, or has an optimizer that
            is not known here.
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointCorrupt: a needed file is missing, truncated, altered or does not match the manifest, or the version
            is another one.
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
    layout, slices = engine.spec.layout, engine.slices.copy()  # in a thread: the placement may change meanwhile
    origin = TensorSources(manifest.layout)
    moves = {
        number: origin.moves_into(Slice(unit=s.chunks.unit, server=0, begin=s.chunks.begin, end=s.chunks.end), layout)
        for number, s in slices.items()
    }
    needed = {s: None for of_slice in moves.values() for move in of_slice for s in slices_of(manifest, move)}
    initial = registry.initial_states(manifest.optimizer)
    if work is not None:
        files = {manifest.file_of(s) for s in needed}
        work.total_bytes += sum(manifest.files[f].bytes for f in files)
        work.total_bytes += 4 * sum(owned.chunks.numel for owned in slices.values())
    source = open_slices(manifest, tuple(needed), work=work)
    updates = {number: _updates(s, layout, source, origin) for number, s in slices.items() if s.trainable}
    return Restore(source=source, moves=moves, updates=updates, initial=initial)


def load(engine: ShardEngine, restore: Restore, work: LongWork | None = None) -> None:
    """Fill the slices from a prepared checkpoint and encode their frames. In a thread, while no step is applied.

    Raises:
        CheckpointError: a file could not be read. The slices hold arbitrary values.
        Busy: a slice was added after the checkpoint was prepared. The slices hold arbitrary values.
    """
    restore.check_slices(engine)
    for number, owned in engine.slices.copy().items():
        if number in restore.moves:
            _fill(owned, restore, number)
            reached(Moment.RESTORE, restore.manifest.version)
            owned.publish(restore.manifest.version)
            if work is not None:
                work.advance(4 * owned.chunks.numel)
    restore.check_slices(engine)


def _fill(owned: OwnedSlice, restore: Restore, number: int) -> None:
    """Fill parameters, moments and update counts of one slice."""
    if owned.trainable:
        present, owned.master.state = owned.master.state, {}
        for name, value in restore.initial.items():
            array = present.pop(name, None)
            owned.master.state[name] = np.empty(owned.chunks.numel, np.float32) if array is None else array
            owned.master.state[name].fill(value)
        owned.master.set_updates(restore.updates[number])
    source = restore.source
    if owned.raw:
        owned.master.values.fill(0.0)  # bytes behind a parameter are no parameter's, and the same on every holder
    for move in restore.moves[number]:
        source.copy(move, owned.master.values, owned.chunks.begin)
        if owned.trainable and source.manifest.layout.units[move.source_unit].trainable:
            for name, array in owned.master.state.items():
                source.copy(move, array, owned.chunks.begin, name)


def _updates(owned: OwnedSlice, layout: Layout, source: OpenSlices, origin: TensorSources) -> tuple[int, ...]:
    """Return the update count of each parameter of a slice's unit; 0 for parameters outside the slice.

    The boxes of a tensor are updated together, so the count is that of the one with the first element.
    """
    updates: list[int] = []
    for p in layout.units[owned.chunks.unit].parameters:
        begin = max(p.offset, owned.chunks.begin)
        inside = begin < min(p.end, owned.chunks.end)
        moves = origin.moves_of(owned.chunks.unit, p, begin, begin + 1) if inside else iter(())
        updates.append(sum(map(source.updates_in, moves)))
    return tuple(updates)
