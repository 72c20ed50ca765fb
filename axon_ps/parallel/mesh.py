"""`Mesh`: the workers of a group as a grid with named axes, and the groups along its axes.

Owns: coordinates, and one group for each line of ranks (or plane, or more) that is asked for. Refuses: to know what an
axis means (wrappers and layers are given its groups). Ranks are laid out in row-major order. So the ranks of the last
axis are neighbours, usually on one host. The axis of most communication, tensor, belongs there.

torch's `DeviceMesh` needs the default process group, of which a process has one. A `Mesh` can be made of any group,
also of ranks that are threads. `Mesh.device_mesh` makes torch's where there is a process group.

Invariants:
- All members have agreed on axes and sizes before a mesh exists.
- A group of the mesh is made by its members alone and without a message, under a name that no other group has. So
  `group` never blocks. The group's members first communicate in its first collective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axon_ps.collectives.backends.base import disagreement
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.redistribute import Placements, redistribute
from axon_ps.texts import value_of_json

_DESCRIPTION_BYTES = 512


class Mesh:
    """A grid of workers, outermost axis first: `Mesh(world.default_group, pipeline=2, data=2, tensor=2)`.

    Making a mesh is collective over the group, with the same axes on every member. The names are free. The wrappers'
    documents use pipeline, data, replicate, shard and tensor.

    Args:
        group: the workers; the product of the sizes must be its size.
        axes: name = size of each axis, outermost first. One size may be -1: the group's size divided by the others.

    Attributes:
        axes: name -> size, in the order given.

    Raises:
        InvalidRequest: there is no axis, a size is below 1, the sizes do not multiply to the size of the group, or the
            names are too long. Nothing was sent: the other members still wait for this one.
        Disagreement: the members gave different axes. The error of every member lists them.
        Misuse: this worker is not a member of the group.

    After an error: there is no mesh. After a member died, the mesh's groups have ended. Make another mesh of the
    remaining members.
    """

    def __init__(self, group: ProcessGroup, **axes: int) -> None:
        self.axes: Mapping[str, int] = _sizes(axes, group.world_size)
        self._group = group
        self._name = _agree(group, self.axes)
        shape = tuple(self.axes.values())
        self._grid = np.arange(group.world_size).reshape(shape)
        self._position = tuple(int(i) for i in np.unravel_index(group.rank, shape))
        self._groups: dict[tuple[str, ...], ProcessGroup] = {tuple(self.axes): group}
        for axis in self.axes:
            self.group(axis)

    @property
    def rank(self) -> int:
        """This worker's rank in the group that the mesh was made of."""
        return self._group.rank

    @property
    def coordinates(self) -> dict[str, int]:
        """This worker's coordinate on every axis."""
        return dict(zip(self.axes, self._position, strict=True))

    def size(self, *axes: str) -> int:
        """Return the number of ranks of an axis; of several axes, their product.

        Raises:
            InvalidRequest: there is no such axis, or one is named twice.
        """
        return math.prod(self.axes[axis] for axis in self._known(axes))

    def coordinate(self, axis: str) -> int:
        """Return this worker's coordinate on an axis: from 0 to `size(axis) - 1`.

        Raises:
            InvalidRequest: there is no such axis.
        """
        self._known((axis,))
        return self.coordinates[axis]

    def group(self, *axes: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one only on these axes; the same object every time.

        The ranks are in row-major order. A rank's position in the group of one axis is its coordinate there. The group
        of several axes is flattened: `mesh.group("data", "tensor")` has data x tensor ranks. The order in which axes
        are named makes no difference. For all axes it is the group that the mesh was made of.

        Raises:
            InvalidRequest: there is no such axis, one is named twice, or none is named.
        """
        chosen = self._known(axes)
        group = self._groups.get(chosen)
        if group is None:
            line = tuple(slice(None) if a in chosen else i for a, i in self.coordinates.items())
            ranks = [int(r) for r in self._grid[line].reshape(-1)]
            # Lines of the same axes are told apart by their first rank.
            name = f"{self._name}/{'+'.join(chosen)}@{ranks[0]}"
            group = self._groups[chosen] = self._group.named_group(name, ranks)
        return group

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank, in the mesh's own group, at some coordinates. Those not given are this worker's.

        Raises:
            InvalidRequest: there is no such axis or coordinate.
        """
        if coordinates:
            self._known(tuple(coordinates))
        for axis, number in coordinates.items():
            if not 0 <= number < self.axes[axis]:
                raise InvalidRequest(f"{axis}={number} is not in {self!r}; {axis} goes from 0 to {self.axes[axis] - 1}")
        return int(self._grid[tuple((self.coordinates | coordinates).values())])

    def redistribute(
        self,
        local: torch.Tensor,
        placements: Placements,
        target: Placements,
        *,
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Give a tensor other placements on the mesh by moving its data; return this rank's shard.

        The call is differentiable, and collective over the groups of the axes that change. `parallel.redistribute` has
        the cost of each change.

        Args:
            local: this rank's shard.
            placements: of `local`: for each axis `Shard(dim)`, `Replicate()` or `Partial()` of
                `torch.distributed.tensor`, in the order of the axes, or by name. An axis that is not named has
                `Replicate()`.
            target: the placements to give it. A Partial placement can stay so. No other can become Partial.
            shape: of the full tensor, where shards may differ; None = they are equal.

        Returns:
            The shard, in memory of its own if anything changed.

        Raises:
            InvalidRequest: a placement is none of these, or Partial as a new target. Or this rank's shard has a wrong
                shape, or requires a gradient that does not exist; the other ranks of the first collective get this
                error, too.
            Disagreement: the ranks gave different things.

        After an error: see `ProcessGroup`.
        """
        return redistribute(local, {axis: self.group(axis) for axis in self.axes}, placements, target, shape)

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Make the same grid for torch.distributed (DTensor, FSDP2, DCP), with the same names of axes; collective.

        Args:
            device_type: "cpu" or "cuda".

        Raises:
            Misuse: torch.distributed is not initialised, or its ranks are not those of the mesh: call
                `torch.distributed.init_process_group("axon")` on all of them first.
        """
        if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (self.rank, self._group.world_size):
            raise Misuse(
                f"a device mesh needs torch.distributed with the ranks of {self!r}; call "
                'torch.distributed.init_process_group("axon") on all of them first'
            )
        return init_device_mesh(device_type, tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))

    def _known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return these axes in the mesh's order.

        Raises:
            InvalidRequest: there is no such axis, one is named twice, or none is named.
        """
        unknown = [a for a in axes if a not in self.axes]
        if unknown or not axes or len(set(axes)) != len(axes):
            given = ", ".join(map(repr, axes)) or "none"
            raise InvalidRequest(f"the axes given are {given}; name axes of {self!r}, each at most once, and one")
        return tuple(a for a in self.axes if a in axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.axes.items())})"


def _sizes(axes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the sizes, with a size of -1 filled in."""
    given = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    sizes = {axis: int(size) for axis, size in axes.items()}
    free = [axis for axis, size in sizes.items() if size == -1]
    if not sizes or len(free) > 1 or any(size < 1 for axis, size in sizes.items() if axis not in free):
        raise InvalidRequest(f"Mesh({given}) needs at least one axis, sizes from 1, and at most one of them -1")
    if free:
        sizes[free[0]] = max(1, world_size // math.prod(s for a, s in sizes.items() if a not in free))
    product = math.prod(sizes.values())
    if product != world_size:
        raise InvalidRequest(
            f"Mesh({given}) has places for {product} workers; the group has {world_size}: "
            "choose sizes whose product that is, or start as many workers"
        )
    return sizes


def _agree(group: ProcessGroup, axes: Mapping[str, int]) -> str:
    """Return a name for the mesh: the same on every member, and new in the group; collective."""
    number = group.sequence
    description = json.dumps([number, list(axes.items())]).encode()
    if len(description) > _DESCRIPTION_BYTES:
        raise InvalidRequest(
            f"the names of the axes are too long: {len(description)} bytes as JSON, {_DESCRIPTION_BYTES} are left"
        )
    ours = np.full(_DESCRIPTION_BYTES, ord(" "), np.uint8)
    ours[: len(description)] = np.frombuffer(description, np.uint8)
    theirs = [value_of_json(bytes(row), "a mesh") for row in group.all_gather(ours).reshape(group.world_size, -1)]
    described = {r: f"Mesh({', '.join(f'{a}={n}' for a, n in t[1])})" for r, t in zip(group.ranks, theirs, strict=True)}
    if len(set(described.values())) > 1:
        raise disagreement(described, "a mesh")
    return f"mesh-{theirs[0][0]}"  # calls of a group never have a number twice, so rank 0's is new
