"""`redistribute`: change the placements of a tensor on the axes of a mesh.

Owns: the choice of collectives. Placements are torch's: `Shard(dim)` (each rank has its shard as `torch.chunk` makes
it), `Replicate()` (the same on all) and `Partial()` (each has a summand). Axes that shard the same dimension do so from
the first to the last, as in torch's DTensor.

    from -> to                 collective on the axis' group            bytes a rank receives, of S in full
    Shard(a) -> Replicate      all-gather                               (n - 1)/n S
    Shard(a) -> Shard(b)       all-to-all                               (n - 1)/n² S
    Replicate -> Shard(a)      none                                     0
    Partial -> Replicate       all-reduce                               2 (n - 1)/n S
    Partial -> Shard(a)        reduce-scatter                           (n - 1)/n S

If several axes shard one dimension, and an outer one changes, the inner ones are gathered first and sharded last.

Backward makes the opposite change. The gradient of a summand is that of the sum. Every rank must compute the same from
a replicated tensor (see `tensor.functions`, Note: [Replicated gradients]).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.chunks import Shards, all_reduce, counts_of, exchanged
from axon_ps.types import ReduceOp

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


Placements = Sequence["Placement"] | Mapping[str, "Placement"]

_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVERAGE,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}


@dataclass(frozen=True)
class _Placement:
    """The placement on one axis: sharded along `dim`, or to be combined with `op` (Partial), or neither (Replicate)."""

    dim: int | None = None
    op: ReduceOp | None = None


@dataclass(frozen=True)
class _Plan:
    """The complete plan, known before the first collective.

    Attributes:
        groups: by axis.
        source, target: by axis.
        shape: of the full tensor.
        changing: axes whose placement changes, or must be undone and done again.
        direct: changing axes that one collective of their own takes from source to target.
    """

    groups: tuple[ProcessGroup, ...]
    source: tuple[_Placement, ...]
    target: tuple[_Placement, ...]
    shape: tuple[int, ...]
    changing: tuple[int, ...]
    direct: tuple[int, ...]

    def extent(self, dim: int, axis: int) -> int:
        """Return the size of a dimension on this rank before `axis` shards it, with earlier axes as in `source`."""
        size = self.shape[dim]
        for placement, group in zip(self.source[:axis], self.groups[:axis], strict=True):
            if placement.dim == dim:
                size = counts_of(size, group.world_size)[group.rank]
        return size

    @property
    def others(self) -> tuple[int, ...]:
        """Axes that change and are not direct."""
        return tuple(axis for axis in self.changing if axis not in self.direct)

    @property
    def first(self) -> ProcessGroup | None:
        """The group of the first collective; None = there is none."""
        gathered = [axis for axis in reversed(self.others) if self.source[axis] != _Placement()]
        return next((self.groups[axis] for axis in (*self.direct, *gathered)), None)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard in `source`."""
        return tuple(self.extent(dim, len(self.groups)) for dim in range(len(self.shape)))


def redistribute(
    local: torch.Tensor,
    axes: Mapping[str, ProcessGroup],
    placements: Placements,
    target: Placements,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """See `Mesh.redistribute`; `axes` has the group along each axis, outermost first."""
    full = tuple(shape) if shape is not None else None
    ndim = local.dim() if full is None else len(full)
    source, wanted = _placements(axes, placements, ndim), _placements(axes, target, ndim)
    groups = tuple(axes.values())
    if full is None:
        sizes = list(local.shape)
        for placement, group in zip(source, groups, strict=True):
            if placement.dim is not None:
                sizes[placement.dim] *= group.world_size
        full = tuple(sizes)
    plan = _planned(groups, source, wanted, full)
    if not plan.changing:
        return local
    calls = plan.first.calls if plan.first is not None else None
    with calls.preparing("redistribute", local.is_cuda, None, False) if calls is not None else contextlib.nullcontext():
        _check(local, plan)
    return exchanged(local, lambda x: _moved(x, plan), lambda grad: _mirrored(grad, plan))


def _placements(axes: Mapping[str, ProcessGroup], given: Placements, ndim: int) -> tuple[_Placement, ...]:
    """Return the placements in the order of the axes."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # takes half a second, and few programs need it

    names = ", ".join(axes)
    if isinstance(given, Mapping):
        if unknown := [axis for axis in given if axis not in axes]:
            raise InvalidRequest(f"there is a placement for {unknown[0]!r}; the mesh has the axes {names}")
        listed = [given.get(axis, Replicate()) for axis in axes]
    else:
        listed = list(given)
    if len(listed) != len(axes):
        raise InvalidRequest(f"{len(listed)} placements were given; the mesh needs one for each of its axes: {names}")
    converted = []
    for axis, placement in zip(axes, listed, strict=True):
        if type(placement) is Replicate:
            converted.append(_Placement())
        elif type(placement) is Partial and placement.reduce_op in _OPS:
            converted.append(_Placement(op=_OPS[placement.reduce_op]))
        elif type(placement) is Shard and -ndim <= placement.dim < ndim:
            converted.append(_Placement(dim=placement.dim % ndim))
        else:
            raise InvalidRequest(
                f"the placement on {axis} is {placement!r} of a tensor of {ndim} dimensions; give Shard(dim), "
                "Replicate() or Partial() of torch.distributed.tensor"
            )
    return tuple(converted)


def _planned(
    groups: tuple[ProcessGroup, ...],
    source: tuple[_Placement, ...],
    target: tuple[_Placement, ...],
    shape: tuple[int, ...],
) -> _Plan:
    pairs = list(zip(source, target, strict=True))
    dims = [{p.dim for p in pair if p.dim is not None} for pair in pairs]
    changing: list[int] = []
    for axis, (old, new) in enumerate(pairs):
        if new.op is not None and new != old:
            raise InvalidRequest(
                "a tensor can be made Partial by no collective; give Shard(dim) or Replicate() as target"
            )
        if old != new or any(dims[axis] & dims[outer] for outer in changing):
            changing.append(axis)
    direct = [
        axis
        for axis in changing
        if source[axis] not in (target[axis], _Placement())
        and target[axis].dim is not None
        and not any(dims[axis] & dims[other] for other in changing if other != axis)
    ]
    return _Plan(groups, source, target, shape, tuple(changing), tuple(direct))


def _check(local: torch.Tensor, plan: _Plan) -> None:
    if tuple(local.shape) != plan.local_shape:
        raise InvalidRequest(
            f"this rank's shard is {list(local.shape)}; of a tensor {list(plan.shape)} it should be "
            f"{list(plan.local_shape)} (give shape= where shards differ)"
        )
    ops = {plan.source[axis].op for axis in plan.changing} - {None, ReduceOp.SUM, ReduceOp.AVERAGE}
    if ops and local.requires_grad:
        raise InvalidRequest("only sums and averages have a gradient; redistribute x.detach()")


def _mirrored(grad: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Return the gradient in `source`, from that in `target`. Collective as `_moved`."""
    source, target = ([_Placement(p.dim) for p in placements] for placements in (plan.source, plan.target))
    for axis in plan.changing:
        if plan.source[axis].op is ReduceOp.AVERAGE:
            grad = grad / plan.groups[axis].world_size
    return _moved(grad, _planned(plan.groups, tuple(target), tuple(source), plan.shape))


def _moved(local: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Return this rank's shard in `target`, in new memory; collective over the groups of the axes that change."""
    for axis in plan.direct:
        old, new, group = plan.source[axis], plan.target[axis], plan.groups[axis]
        assert new.dim is not None
        if old.dim is None:
            assert old.op is not None
            local = _shards(local, group, new.dim).reduce_scatter(local, old.op)
        else:
            local = _all_to_all(local, group, old.dim, new.dim, plan.extent(old.dim, axis))
    for axis in reversed(plan.others):
        old, group = plan.source[axis], plan.groups[axis]
        if old.op is not None:
            local = all_reduce(local, group, old.op)
        elif old.dim is not None:
            local = Shards(group, old.dim, counts_of(plan.extent(old.dim, axis), group.world_size)).gather(local)
    for axis in plan.others:
        new, group = plan.target[axis], plan.groups[axis]
        if new.dim is not None:
            local = _shards(local, group, new.dim).own(local)
    return local


def _shards(local: torch.Tensor, group: ProcessGroup, dim: int) -> Shards:
    return Shards(group, dim, counts_of(local.size(dim), group.world_size))


def _all_to_all(local: torch.Tensor, group: ProcessGroup, old: int, new: int, size: int) -> torch.Tensor:
    """Return the shard along `new` of a tensor that is sharded along `old`, whose size is `size`."""
    lengths = counts_of(local.size(new), group.world_size)
    sent = [shard.reshape(-1) for shard in torch.split(local, list(lengths), dim=new)]
    shape = list(local.shape)
    shape[new] = lengths[group.rank]
    shapes = [[*shape[:old], length, *shape[old + 1 :]] for length in counts_of(size, group.world_size)]
    counts = [torch.Size(s).numel() for s in shapes]
    flat: torch.Tensor = group.all_to_all(
        torch.cat(sent), output_counts=counts, input_counts=[shard.numel() for shard in sent]
    )
    received = torch.split(flat, counts)
    return torch.cat([shard.view(s) for shard, s in zip(received, shapes, strict=True)], dim=old)
