"""The gradients of a node: averaged inside it, after which each worker pushes its shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import LoopWork
from axon_ps.parallel.fsdp.hybrid.calls import NodeCalls
from axon_ps.parallel.fsdp.hybrid.parameters import LocalShard, NodeParameters
from axon_ps.parallel.fsdp.hybrid.ticket import NodeTicket
from axon_ps.parallel.precision import TORCH_DTYPES
from axon_ps.parallel.work import QueuedWork
from axon_ps.types import Array, DType
from axon_ps.worker.steps.gradients import Gradients
from axon_ps.worker.steps.ticket import Ticket


class NodeGradients:
    """The gradients of the workers of a node.

    Args:
        own: pushes to the servers.
        calls: the calls inside the node.
        parameters: has the shards, which are pulled after their push.
        dtype: the dtype in which gradients are sent.
        staging: copies between the device and the host.
    """

    def __init__(
        self, own: Gradients, calls: NodeCalls, parameters: NodeParameters, dtype: DType, staging: Staging
    ) -> None:
        self._own = own
        self._calls = calls
        self._parameters = parameters
        self._dtype = dtype
        self._staging = staging

    def push(
        self, unit: int, grad: Array | torch.Tensor | None, ticket: Ticket, done: Callable[[], None] | None = None
    ) -> QueuedWork[None]:
        """Add up the node's gradients of a unit, and push this worker's shard of the sum.

        Args:
            unit: its number.
            grad: wire[unit_numel], in device memory if the node's groups are; overwritten. None when no worker of the
                node has one.
            ticket: from `NodeSteps.ticket`.
            done: called when the buffer is free again.
        """
        assert isinstance(ticket, NodeTicket)
        self._calls.record(b"a" if grad is None else b"p", unit)
        shard = self._parameters.shards[unit]
        full = None if grad is None else arrays.flatten(typed(grad, self._dtype))

        def run() -> LoopWork[None] | None:
            started = False
            try:
                mine = None if full is None else self._calls.within(lambda: self._reduced(shard, full))
                if shard.end == shard.begin or self._calls.group_error is not None:
                    return None
                sent, free = (None, done) if mine is None else self._on_host(mine, done)
                started = True
                pushing = self._own.push(unit, sent, ticket.shared, free, begin=shard.begin, end=shard.end)
                self._parameters.pull_speculative(unit, ticket)
                return pushing
            finally:
                if not started and done is not None:
                    done()

        given_up = done if done is not None else lambda: None
        return self._calls.in_order(run, f"pushing unit {unit} of the node", given_up)

    def _reduced(self, shard: LocalShard, full: Flat) -> Flat:
        """Return this worker's shard of the node's sum, a view of `full`."""
        mine = dataclasses.replace(full, array=full.array[shard.begin : shard.end], shape=(shard.end - shard.begin,))
        self._calls.groups.data.reduce_scatter(full, out=mine, counts=shard.counts)
        return mine

    def _on_host(self, mine: Flat, done: Callable[[], None] | None) -> tuple[Array, Callable[[], None] | None]:
        """Return the shard in host memory, page-locked if it was on the device, and a function to call afterwards."""
        if not mine.device:
            return mine.array, done
        host = self._staging.allocate(mine.array)
        with arrays.on_stream(mine):
            self._staging.download(mine.array, host)

        def free() -> None:
            self._staging.free(host)
            if done is not None:
                done()

        return host, free


def typed(grad: Array | torch.Tensor, dtype: DType) -> Any:
    """Return a gradient in its own dtype. In numpy bf16 is uint16."""
    if isinstance(grad, torch.Tensor):
        return grad
    return torch.from_numpy(grad).view(TORCH_DTYPES[dtype]) if dtype is DType.BF16 else grad
