"""`NodeRuntime`: the steps of a worker that is one replica together with the other workers of its node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_ps.parallel.fsdp.hybrid.node import NodeSteps
from axon_ps.parallel.fsdp.on_servers.server_runtime import ServerRuntime
from axon_ps.parallel.fsdp.steps import StepStatus
from axon_ps.types import Hyper


class NodeRuntime(ServerRuntime):
    """`ServerRuntime` under HYBRID_SHARD.

    Args:
        node: makes the worker's half of a step with the node's workers.
        rest: as for `ServerRuntime`.
    """

    def __init__(self, node: NodeSteps, *rest: Any) -> None:
        super().__init__(*rest, steps=node, device=node.device)
        self._node = node

    @property
    def shard_numel(self) -> int:
        """See `Runtime.shard_numel`."""
        return sum(shard.values.numel() for shard in self._node.parameters.shards)

    def agree(self) -> None:
        """See `Runtime.agree`."""
        if self._node.agree():
            self.begin_anew()

    def step_status(self) -> StepStatus:
        """See `Runtime.step_status`; the same for all workers of the node but for their coordinates in it."""
        while True:
            self.agree()
            found = super().step_status()
            if self._node.settled(found.generation):
                return found

    def refresh(self) -> None:
        """See `Runtime.refresh`."""
        self.agree()
        self._node.parameters.wait_pulled()

    def _expect(self, hyper: Sequence[Hyper] | None) -> None:
        self._node.expect(hyper)
