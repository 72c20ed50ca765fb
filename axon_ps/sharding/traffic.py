"""The bytes that the workers of a node exchange with shard servers in a step, by strategy. It is pure.

P    parameters of the model, T of them trainable; r the root; b the last units, which stay for backward
w    bytes of an element as gathered, g of a gradient as sent; G workers of a node

strategy        from the servers                              to the servers
FULL_SHARD      G·w·(2P - r - b); with PARAMS G·w·T           G·g·T
SHARD_GRAD_OP   G·w·T                                         G·g·T
HYBRID_SHARD    w·T                                           g·T

The units that stay fit together into `BUFFERS` times the largest one. These are the last two of equal units, or fewer
if values are gathered into buffers. A server on the same host takes its part without the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from axon_ps.compress.compressor import Compressor
from axon_ps.sharding.layout import Unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import DType

BUFFERS = 2
"""Limit of the prefetched gathers, and of the pushes under way, as a multiple of the largest unit."""


@dataclass(frozen=True, kw_only=True)
class ModuleBytes:
    """The bytes of the parameters of a module that is gathered at once.

    Attributes:
        gathered: from servers.
        gathered_trainable: those of them that the optimizer updates.
        sent: gradients, to servers.
        flat: parameters in the dtype that they compute in.
        buffers: buffers beside `flat` for the values that arrive.
    """

    gathered: int
    gathered_trainable: int
    sent: int
    flat: int
    buffers: int

    @classmethod
    def of(cls, units: Sequence[Unit], precision: WirePrecision, *, flat: int, buffers: int) -> ModuleBytes:
        """Count the bytes of a module with these units."""
        trainable = [unit.numel for unit in units if unit.trainable]
        return cls(
            gathered=sum(gathered_bytes(precision, unit.numel) for unit in units),
            gathered_trainable=sum(gathered_bytes(precision, numel) for numel in trainable),
            sent=sum(sent_bytes(precision, numel) for numel in trainable),
            flat=flat,
            buffers=buffers,
        )


def gathered_bytes(precision: WirePrecision, numel: int) -> int:
    """Return the bytes of so many parameters on their way from servers."""
    return _wire_bytes(precision.param, precision.param_compression, numel)


def sent_bytes(precision: WirePrecision, numel: int) -> int:
    """Return the bytes of so many gradients on their way to servers."""
    return _wire_bytes(precision.grad, precision.grad_compression, numel)


def _wire_bytes(dtype: DType, compression: Compressor | None, numel: int) -> int:
    return dtype.itemsize * numel if compression is None else compression.compressed_bytes(numel)


def fitting(sizes: Iterable[int], budget: int) -> int:
    """Return how many of these fit together into the budget, from the first on."""
    return sum(total <= budget for total in accumulate(sizes))


def node_traffic(
    modules: Sequence[ModuleBytes], workers: int, *, offloads: bool, parts: int = 1
) -> Mapping[str, tuple[int, int]]:
    """Return the bytes that a node receives and sends in a step, by strategy; see the table above.

    Args:
        modules: the root, and the other modules in forward order.
        workers: G.
        offloads: True if FULL_SHARD has copies of the parameters on the host.
        parts: parts of the node that are a node each to HYBRID_SHARD.
    """
    root, *inner = modules
    budget = BUFFERS * max((module.flat for module in inner), default=0)
    staying = inner[len(inner) - fitting((m.flat + m.buffers for m in reversed(inner)), budget) :]
    gathered, trainable, sent = (
        sum(getattr(module, name) for module in modules) for name in ("gathered", "gathered_trainable", "sent")
    )
    twice = 2 * gathered - root.gathered - sum(module.gathered for module in staying)
    return {
        "FULL_SHARD": (workers * (trainable if offloads else twice), workers * sent),
        "SHARD_GRAD_OP": (workers * trainable, workers * sent),
        "HYBRID_SHARD": (parts * trainable, parts * sent),
    }
