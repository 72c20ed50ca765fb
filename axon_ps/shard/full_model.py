"""`FullModel`: a model of which one process has all values, or some units, as a shard server that owns them has it.

A process without shard servers writes and reads checkpoints with it, in the format of the servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.apply import Pin, VersionPins
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import Manifest
from axon_ps.types import Array


class FullModel:
    """The values and moments of a model, in host memory.

    Args:
        spec: its layout, and the sizes in which units are cut.
        units: numbers of the units that it has; None = all.
    """

    def __init__(self, spec: JobSpec, units: Collection[int] | None = None) -> None:
        here, elsewhere = Holders((0,)), Holders((1,))
        holders = (here if units is None or s.unit in units else elsewhere for s in spec.plan(1).numbered)
        self._engine = ShardEngine()
        self._engine.configure(spec, 0, 1, Placement(tuple(holders), num_cuts=1))

    def set(self, unit: int, values: Array, version: int) -> None:
        """Set the values of a unit, f32[unit_numel], at a version."""
        owned = self._owned(unit)
        owned.master.values[:] = values
        owned.publish(version)

    def set_moments(self, unit: int, moments: Mapping[str, Array], updates: Sequence[int]) -> None:
        """Set the moments of a unit, f32[unit_numel] by name, and the updates of each parameter."""
        owned = self._owned(unit)
        owned.master.state = dict(moments)
        owned.master.set_updates(updates)

    def write(self, uri: str, version: int) -> FileEntry:
        """Write the file of a checkpoint. The values of all its units are those of this version.

        Raises:
            StorageFull: no space left. Existing files are untouched.
            CheckpointError: it could not be written. Existing files are untouched.
        """
        self._engine.restored(version, None)
        return snapshot.write(self._engine, uri, version, 0, 1, VersionPins(), Pin(version))

    def read(self, section: Manifest) -> Manifest:
        """Read a model's section of a checkpoint; return it as it was read.

        Raises:
            InvalidRequest: it lacks a parameter or has it in another shape, or its optimizer is not known here.
            CheckpointError: it is not there, cannot be read, or is damaged.
        """
        prepared = snapshot.prepare(self._engine, section.uri, section.version, section.name)
        with contextlib.closing(prepared) as restore:
            snapshot.load(self._engine, restore)
        return restore.manifest

    def values(self, unit: int) -> Array:
        """Return the values of a unit, f32[unit_numel]."""
        return self._owned(unit).master.values

    def moments(self, unit: int) -> tuple[Mapping[str, Array], Sequence[int]]:
        """Return the moments of a trainable unit, f32[unit_numel] by name, and the updates of each parameter."""
        master = self._owned(unit).master
        return master.state, master.parameter_updates()

    def _owned(self, unit: int) -> OwnedSlice:
        return self._engine.slices.of(unit, 0)
