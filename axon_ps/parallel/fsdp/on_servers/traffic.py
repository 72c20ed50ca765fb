"""The strategy chosen by the workers of each node, and the bytes by strategy, as a table and in the log."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.fsdp.arguments import Arguments, understood
from axon_ps.parallel.fsdp.strategy import ShardingStrategy
from axon_ps.parallel.fsdp.tensors import float8_weights
from axon_ps.parallel.precision import TORCH_DTYPES, MixedPrecision
from axon_ps.sharding.layout import ELEMENT_BYTES, Unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.sharding.traffic import ModuleBytes, node_traffic
from axon_ps.types import Member, Membership, parse_member
from axon_ps.worker.world import World

_logger = logging.getLogger(__name__)

_FULL, _HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """The traffic of a strategy; see `sharding.traffic`.

    Attributes:
        strategy: the sharding strategy.
        received_bytes: parameters, of a node and step.
        sent_bytes: gradients, of a node and step.
    """

    strategy: ShardingStrategy
    received_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        return f"{self.strategy.name} {_text(self.received_bytes)} in, {_text(self.sent_bytes)} out"


@dataclass(frozen=True, kw_only=True)
class TrafficEstimate:
    """The traffic of a model's strategies; `print` shows it as a table.

    Attributes:
        rows: the strategies that use shard servers.
        strategy: FSDP's default for these workers.
        why: the reason.
    """

    rows: tuple[NodeTraffic, ...]
    strategy: ShardingStrategy
    why: str

    def of(self, strategy: ShardingStrategy | str) -> NodeTraffic:
        """Return the row of a strategy."""
        wanted = parse_member(strategy, ShardingStrategy, "strategy")
        return next(row for row in self.rows if row.strategy is wanted)

    def __str__(self) -> str:
        lines = [f"{'a node and step':<16}{'in':>10}{'out':>10}"]
        lines += [f"{r.strategy.name:<16}{_text(r.received_bytes):>10}{_text(r.sent_bytes):>10}" for r in self.rows]
        return "\n".join([*lines, f"chosen: {self.strategy.name} ({self.why})"])


def estimate(
    module: nn.Module,
    world: World | None = None,
    *,
    workers: int = 1,
    nodes: int = 1,
    gpus: bool | None = None,
    **options: Any,
) -> TrafficEstimate:
    """Estimate the bytes that a node exchanges with shard servers in a step, by strategy; also before a job runs.

    Args:
        module: the model, not wrapped; it may be on the meta device.
        world: the workers; None = `workers` on `nodes`, as many on each.
        workers: number of workers.
        nodes: number of nodes.
        gpus: True if workers have GPUs; None = as in this process if a world is given, or else True.
        options: of `FullyShardedDataParallel`: `unit_types`, `auto_wrap_policy`, `mixed_precision`, `cpu_offload`,
            `ignored_parameters`, `retain_frozen`.

    Raises:
        InvalidRequest: the module cannot be sharded, `workers` is not a multiple of `nodes`, or as of
            `FullyShardedDataParallel`.
    """
    if world is None and (nodes < 1 or workers < 1 or workers % nodes):
        raise InvalidRequest(f"workers is {workers} and nodes {nodes}; give a multiple of the nodes")
    given = {"unit_types": (), "auto_wrap_policy": None, "mixed_precision": None, "cpu_offload": None, **options}
    known = {name: understood(name, value) for name, value in given.items()}
    units, precision, _ = wrap.divide(
        module,
        known["auto_wrap_policy"],
        known["unit_types"],
        float8_weights.precision_for(module, known["mixed_precision"]),
        known.get("ignored_parameters", ()),
    )
    sizes = [workers // nodes] * nodes if world is None else _sizes(world.membership.workers)
    if gpus is None:
        gpus = world is None or torch.cuda.is_available()
    wire = precision.wire(wrap.widest_dtype(units))
    if wire.by_tensor:
        units = float8_weights.marked(module, units)
    strategy, why = chosen(sizes, gpus=gpus)
    offloads = known["cpu_offload"].offloads_params
    retains = known.get("retain_frozen", True)
    rows = traffic(units, precision, wire, max(sizes), offloads=offloads, on_device=gpus, retains=retains)
    return TrafficEstimate(rows=rows, strategy=strategy, why=why)


def traffic(
    units: tuple[wrap.WrappedUnit, ...],
    precision: MixedPrecision,
    wire: WirePrecision,
    workers: int,
    *,
    offloads: bool,
    on_device: bool,
    retains: bool = True,
    divisor: int = 1,
) -> tuple[NodeTraffic, ...]:
    """Compute the traffic of a node of `workers` workers.

    Args:
        units: the units of the model, the root first.
        precision: dtypes of compute.
        wire: the form of parameters and gradients on the wire.
        workers: G.
        offloads: True if FULL_SHARD has copies of the parameters on the host.
        on_device: True if parameters compute on a GPU.
        retains: True if frozen units stay under FULL_SHARD.
        divisor: number of nodes of HYBRID_SHARD that the node is divided into.
    """
    by_owner: dict[str, list[wrap.WrappedUnit]] = {"": []}
    for wrapped in units:
        by_owner.setdefault(wrapped.owner, []).append(wrapped)
    arriving = (
        TORCH_DTYPES[wire.param] if wire.param_compression is None else precision.compute(wrap.widest_dtype(units))
    )

    def flat_bytes(unit: Unit) -> tuple[int, int]:
        """Return the bytes of a unit as it computes, and of a buffer for its values."""
        if unit.raw:
            return unit.numel * ELEMENT_BYTES, unit.numel * ELEMENT_BYTES if on_device else 0
        dtype = precision.compute(TORCH_DTYPES[unit.parameters[0].dtype])
        return unit.numel * dtype.itemsize, unit.numel * arriving.itemsize if on_device or dtype != arriving else 0

    modules = [
        ModuleBytes.of([(w.unit, *flat_bytes(w.unit)) for w in owned], wire, retains=retains)
        for owned in by_owner.values()
    ]
    found = node_traffic(modules, workers, offloads=offloads or wire.differs, divisor=divisor)
    return tuple(
        NodeTraffic(strategy=ShardingStrategy[name], received_bytes=received, sent_bytes=sent)
        for name, (received, sent) in found.items()
    )


def chosen(sizes: Sequence[int], *, gpus: bool) -> tuple[ShardingStrategy, str]:
    """Return the strategy of a model for which none was given, and the reason.

    Args:
        sizes: the workers of each node.
        gpus: True if the model computes on GPUs.
    """
    if len(different := sorted(set(sizes))) > 1:
        return _FULL, f"nodes have {' and '.join(map(str, different))} workers"
    if different == [1]:
        return _FULL, "each node has one worker"
    if not gpus:
        return _FULL, "the model is not on GPUs"
    if importlib.util.find_spec("cupy") is None:
        return _FULL, "cupy is not installed, and with it NCCL"
    return _HYBRID, f"each node has {different[0]} workers with GPUs"


def strategy_for(given: Arguments, members: Sequence[Member], device: torch.device) -> tuple[ShardingStrategy, str]:
    """Return the strategy that was given, or else is chosen; and the reason, "" = it was given."""
    if given.sharding_strategy is not None:
        return given.sharding_strategy, ""
    if given.intra_node_size is not None:
        return _HYBRID, "intra_node_size was given"
    if given.line:
        return _FULL, "each worker of a replica has parameters of its own"
    return chosen(_sizes(members), gpus=cuda.memory().is_device(device))


def log_choice(wrapping: wrap.Wrapping, units: tuple[wrap.WrappedUnit, ...], membership: Membership, why: str) -> None:
    """Log the strategy that was chosen, with the reason `why`, or warn of a given strategy that moves many more bytes.

    On one host with all shard servers nothing moves between hosts.
    """
    workers = max(_sizes(membership.workers), default=1)
    offloads, on_device = wrapping.offload.offloads_params, wrapping.on_device
    divisor = workers // wrapping.node_size if wrapping.strategy is _HYBRID else 1
    wire = wrapping.spec.precision
    retains = wrapping.retain_frozen
    rows = traffic(
        units,
        wrapping.precision,
        wire,
        workers,
        offloads=offloads,
        on_device=on_device,
        retains=retains,
        divisor=divisor,
    )
    if why:
        listed = "; ".join(map(str, rows))
        _logger.info("model %r: %s, since %s. A node and step: %s", wrapping.name, wrapping.strategy.name, why, listed)
    elif (
        wrapping.strategy is _FULL
        and workers > 1
        and len({m.node for m in (*membership.workers, *membership.shards)}) > 1
    ):
        _logger.warning(
            "model %r: a node of %d workers moves %s a step; with sharding_strategy='hybrid_shard' %s",
            wrapping.name,
            workers,
            rows[0],
            rows[-1],
        )


def _sizes(members: Sequence[Member]) -> list[int]:
    """Return the number of workers of each node."""
    return list(Counter(member.node for member in members).values())


def _text(size_bytes: int) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= one:
            return f"{size_bytes / one:.3g} {unit}"
    return f"{size_bytes / 1e3:.3g} kB"


__all__ = ["NodeTraffic", "TrafficEstimate", "estimate", "log_choice", "strategy_for", "traffic"]
