"""The units of this worker's module in the layout of all lines of a mesh. See `union`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.mesh.boxes import box_of, extent_of, is_divided, ranks_of
from axon_ps.parallel.fsdp.mesh.lines import MeshLines
from axon_ps.parallel.fsdp.mesh.union import Box, Line, LineUnit, union
from axon_ps.parallel.fsdp.strategy import ShardingStrategy
from axon_ps.parallel.fsdp.wrap import WrappedUnit
from axon_ps.sharding.layout import Layout


def is_divided_model(units: Sequence[WrappedUnit]) -> bool:
    """Return True if any parameter is a DTensor."""
    return any(is_divided(param) for wrapped in units for param in wrapped.params)


def check_divided(units: Sequence[WrappedUnit], line: Sequence[int], strategy: ShardingStrategy) -> None:
    """Check that the parameters and the strategy go with the axes of the mesh that were given.

    Args:
        units: the units of this worker's module.
        line: the ranks of torch's on the axis dp; empty = each worker is a replica.
        strategy: the sharding strategy.

    Raises:
        InvalidRequest: a parameter is a DTensor without a line, or the strategy needs workers that have all of a model.
    """
    found = ((names[0], p) for w in units for names, p in zip(w.names, w.params, strict=True) if is_divided(p))
    divided = dict(found)
    if name := next((name for name, param in divided.items() if param.is_meta), ""):
        raise InvalidRequest(
            f"parameter {name!r} is a DTensor on the meta device, and one worker cannot give it values; call "
            "to_empty() on the model and initialise it, before its optimizer is made"
        )
    if not line:
        if name := next(iter(divided), ""):
            raise InvalidRequest(
                f"parameter {name!r} is a DTensor, which several workers have together: say which workers are replicas "
                "of each other, as in fully_shard(module, mesh=mesh['dp'])"
            )
    elif strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD):
        raise InvalidRequest(
            f"{strategy.name} needs workers that have all of the model, and of a mesh with other axes than dp each has "
            "its own parameters: use FULL_SHARD or SHARD_GRAD_OP (reshard_after_forward=True or False)"
        )


def joined(mesh: MeshLines, model: str, units: Sequence[WrappedUnit]) -> tuple[str, Layout, tuple[WrappedUnit, ...]]:
    """Return the class of the model, the layout of all lines, and this worker's units in it.

    Args:
        mesh: the lines.
        model: the class of this worker's module.
        units: the units of this worker's module.

    Raises:
        LayoutMismatch: a worker of this line has other units, or lines contradict each other.
        InvalidRequest: a DTensor is divided among workers of several replicas.
        Timeout: the workers of a line wrap no model by this name.
    """
    described = [Line.from_json(value) for value in mesh.exchange("units", _described(mesh, model, units).to_json())]
    of_all = union(described)
    own = tuple(
        replace(
            units[o.of],
            unit=of_all.layout.units[o.index],
            params=tuple(units[o.of].params[i] for i in o.boxes),
            names=tuple(units[o.of].names[i] for i in o.boxes),
            number=o.index,
            pushes=o.pushes,
        )
        for o in of_all.own[mesh.own]
    )
    return described[0].model, of_all.layout, own


def _described(mesh: MeshLines, model: str, units: Sequence[WrappedUnit]) -> Line:
    params = [param for wrapped in units for param in wrapped.params]
    neighbours = sorted({rank for p in params if is_divided(p) for rank in ranks_of(p)} | {mesh.rank})
    numbers = {line[mesh.replica]: number for number, line in enumerate(mesh.lines)}
    described = []
    for wrapped in units:
        boxes = []
        for spec, names, param in zip(wrapped.unit.parameters, wrapped.names, wrapped.params, strict=True):
            ranks, shape, begin = extent_of(param, neighbours)
            if not numbers.keys() >= set(ranks):
                raise InvalidRequest(
                    f"parameter {names[0]!r} is divided among ranks {list(ranks)}, and a replica is ranks "
                    f"{sorted(numbers)}: give fully_shard the axis of the mesh on which no parameter is divided"
                )
            boxes.append(
                Box(
                    names=names,
                    shape=tuple(box_of(param).shape),
                    dtype=spec.dtype,
                    raw=spec.raw,
                    float8=spec.float8,
                    lines=tuple(sorted(numbers[rank] for rank in ranks)),
                    tensor_shape=shape,
                    begin=begin,
                )
            )
        described.append(LineUnit(name=wrapped.unit.name, trainable=wrapped.unit.trainable, boxes=tuple(boxes)))
    return Line(model=model, units=tuple(described))
