"""The bytes that the workers of a node exchange with shard servers in a step, and the strategy chosen by them.

P    parameters of the model, T of them trainable; r the root; b the last two units, which stay for backward
w    bytes of an element as gathered, g of a gradient as sent, without compression; G workers of a node

strategy        from the servers                              to the servers
FULL_SHARD      G·w·(2P - r - b); with PARAMS G·w·T           G·g·T
SHARD_GRAD_OP   G·w·T                                         G·g·T
HYBRID_SHARD    w·T                                           g·T

Raw parameters have bytes of their own in place of w. If frozen units stay (`wrap`, Note: [Frozen parameters stay]),
FULL_SHARD gathers only trainable ones, and b is as many of the last ones as fit into twice the largest unit and an
eighth of the frozen ones. A server on the same host takes its part without the network.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from axon_ps.collectives import cuda
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp import wrap
from axon_ps.parallel.fsdp.arguments import Arguments, understood
from axon_ps.parallel.fsdp.gathering import BUFFERS
from axon_ps.parallel.fsdp.stats import RETAINED_PER_BYTE
from axon_ps.parallel.fsdp.strategy import ShardingStrategy
from axon_ps.sharding.layout import ELEMENT_BYTES
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Member, Membership
from axon_ps.worker.world import World

_logger = logging.getLogger(__name__)

_FULL, _HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """One row of the table in the module's docstring.

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

    def of(self, strategy: ShardingStrategy) -> NodeTraffic:
        """Return the row of a strategy."""
        return next(row for row in self.rows if row.strategy is strategy)

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
    gpus: bool = True,
    **options: Any,
) -> TrafficEstimate:
    """Estimate the bytes that a node exchanges with shard servers in a step, by strategy; also before a job runs.

    Args:
        module: the model, not wrapped; it may be on the meta device.
        world: the workers; None = `workers` on `nodes`, as many on each.
        workers: number of workers.
        nodes: number of nodes.
        gpus: True if workers have GPUs.
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
    is_unit = known["auto_wrap_policy"] or (lambda child: isinstance(child, known["unit_types"]))
    units = wrap.partition(module, is_unit, known.get("ignored_parameters", ()))
    sizes = [workers // nodes] * nodes if world is None else _sizes(world.membership.workers)
    precision = known["mixed_precision"].wire(wrap.widest_dtype(units))
    strategy, why = chosen(sizes, gpus=gpus)
    rows = traffic(
        units,
        precision,
        max(sizes),
        offloads=known["cpu_offload"].offloads_params,
        retains=known.get("retain_frozen", True),
    )
    return TrafficEstimate(rows=rows, strategy=strategy, why=why)


def traffic(
    units: Sequence[wrap.WrappedUnit],
    precision: WirePrecision,
    workers: int,
    *,
    offloads: bool = False,
    retains: bool = True,
    divisor: int = 1,
) -> tuple[NodeTraffic, ...]:
    """Compute the traffic of a node of `workers` workers.

    Args:
        units: the units of the model, the root first.
        precision: dtypes on the wire.
        workers: G.
        offloads: True if FULL_SHARD has copies of the parameters on the host.
        retains: True if frozen units stay under FULL_SHARD.
        divisor: number of nodes of HYBRID_SHARD that the node is divided into.
    """
    param_bytes = precision.param.itemsize
    trainable = sum(wrapped.unit.numel for wrapped in units if wrapped.unit.trainable)
    pulled, pushed = param_bytes * trainable, precision.grad.itemsize * trainable
    by_unit, gathered = Counter[str](), Counter[str]()
    for wrapped in units:
        size_bytes = wrapped.unit.numel * (ELEMENT_BYTES if wrapped.unit.raw else param_bytes)
        by_unit[wrapped.owner] += size_bytes
        gathered[wrapped.owner] += size_bytes if wrapped.unit.trainable or not retains else 0
    retained_bytes = by_unit.total() - gathered.total()
    staying_bytes = _staying_bytes([(by_unit[o], gathered[o]) for o in by_unit if o], retained_bytes)
    twice = 2 * gathered.total() - gathered[""] - staying_bytes
    rows = {
        _FULL: (workers * (pulled if offloads else twice), workers * pushed),
        ShardingStrategy.SHARD_GRAD_OP: (workers * pulled, workers * pushed),
        _HYBRID: (divisor * pulled, divisor * pushed),
    }
    return tuple(
        NodeTraffic(strategy=strategy, received_bytes=received, sent_bytes=sent)
        for strategy, (received, sent) in rows.items()
    )


def _staying_bytes(inner: Sequence[tuple[int, int]], retained_bytes: int) -> int:
    """Return the bytes that stay from forward to backward.

    Args:
        inner: by unit beside the root, its bytes, and those of them that are gathered in each step.
        retained_bytes: those that are not.
    """
    gathered = [of_step for _, of_step in inner]
    if not retained_bytes:
        return sum(gathered[-BUFFERS:])
    most_bytes = BUFFERS * max((size_bytes for size_bytes, _ in inner), default=0) + retained_bytes // RETAINED_PER_BYTE
    return max(total for total in accumulate(reversed(gathered), initial=0) if total <= most_bytes)


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


def log_choice(wrapping: wrap.Wrapping, units: Sequence[wrap.WrappedUnit], membership: Membership, why: str) -> None:
    """Log the strategy that was chosen, with the reason `why`, or warn of a given strategy that moves many more bytes.

    On one host with all shard servers nothing moves between hosts.
    """
    workers = max(_sizes(membership.workers), default=1)
    divisor = workers // wrapping.node_size if wrapping.strategy is _HYBRID else 1
    rows = traffic(
        units,
        wrapping.spec.precision,
        workers,
        offloads=wrapping.offload.offloads_params,
        retains=wrapping.retain_frozen,
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
