"""The bytes that the workers of a node exchange with shard servers in a step, by strategy. It is pure.

P    parameters of the model, T of them trainable; r the root; b the last units, which stay for backward
w    bytes of an element as gathered, g of a gradient as sent; G workers of a node

strategy        from the servers                              to the servers
FULL_SHARD      G·w·(2P - r - b); with PARAMS or int4 G·w·T   G·g·T
SHARD_GRAD_OP   G·w·T                                         G·g·T
HYBRID_SHARD    w·T                                           g·T

The last units fit together into `BUFFERS` times the largest one. These are the last two of equal units, or fewer if
values are gathered into buffers. Frozen units that are retained are gathered once in a job, and the others may take an
eighth of their bytes in addition. Raw parameters have bytes of their own in place of w. A server on the same host takes
its part without the network.
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

RETAINED_PER_BYTE = 8
"""Bytes of frozen units that stay, for each byte that trainable ones may take in addition until backward."""


@dataclass(frozen=True, kw_only=True)
class ModuleBytes:
    """The bytes of the parameters of a module that is gathered at once.

    Attributes:
        gathered: from servers, whenever the module is gathered: without frozen units that stay.
        gathered_trainable: those of them that the optimizer updates.
        sent: gradients, to servers.
        flat: parameters in the dtype that they compute in.
        beside: memory of the parameters that `gathered` counts, with buffers for the values that arrive.
        retained: from servers, once in a job: frozen units that stay.
    """

    gathered: int
    gathered_trainable: int
    sent: int
    flat: int
    beside: int
    retained: int

    @classmethod
    def of(cls, units: Sequence[tuple[Unit, int, int]], precision: WirePrecision, *, retains: bool) -> ModuleBytes:
        """Count the bytes of a module.

        Args:
            units: its units, each with its bytes in the dtype that it computes in, and those of a buffer for it.
            precision: the form on the wire.
            retains: True if frozen units stay from one step to the next.
        """
        moved = [(unit, flat + buffer) for unit, flat, buffer in units if unit.trainable or not retains]
        trainable = [unit for unit, *_ in units if unit.trainable]
        return cls(
            gathered=sum(unit_bytes(precision, unit) for unit, _ in moved),
            gathered_trainable=sum(unit_bytes(precision, unit) for unit in trainable),
            sent=sum(sent_bytes(precision, unit.numel) for unit in trainable),
            flat=sum(flat for _, flat, _ in units),
            beside=sum(size_bytes for _, size_bytes in moved),
            retained=sum(unit_bytes(precision, unit) for unit, *_ in units if retains and not unit.trainable),
        )


def unit_bytes(precision: WirePrecision, unit: Unit) -> int:
    """Return the bytes of a unit on its way from servers."""
    return gathered_bytes(precision.of_unit(unit), unit.numel)


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
    modules: Sequence[ModuleBytes], workers: int, *, offloads: bool, divisor: int = 1
) -> Mapping[str, tuple[int, int]]:
    """Return the bytes that a node receives and sends in a step, by strategy; see the table above.

    Args:
        modules: the root, and the other modules in forward order.
        workers: G.
        offloads: True if FULL_SHARD has copies of the parameters on the host.
        divisor: number of nodes of HYBRID_SHARD that the node is divided into.
    """
    root, *inner = modules
    budget = BUFFERS * max((module.flat for module in inner), default=0)
    budget += sum(module.retained for module in modules) // RETAINED_PER_BYTE
    staying = inner[len(inner) - fitting((m.beside for m in reversed(inner)), budget) :]
    gathered, trainable, sent = (
        sum(getattr(module, name) for module in modules) for name in ("gathered", "gathered_trainable", "sent")
    )
    twice = 2 * gathered - root.gathered - sum(module.gathered for module in staying)
    return {
        "FULL_SHARD": (workers * (trainable if offloads else twice), workers * sent),
        "SHARD_GRAD_OP": (workers * trainable, workers * sent),
        "HYBRID_SHARD": (divisor * trainable, divisor * sent),
    }
