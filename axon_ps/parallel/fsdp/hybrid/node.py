"""HYBRID_SHARD: the workers of a node as one replica, behind the interface of `StepClient`.

`NodeSteps` gathers a unit from the node's workers, each of which has a shard of it in the wire dtype. It averages a
gradient inside the node before each worker pushes its shard. Only shards cross the network.

Invariants:
- The workers of a node make the same calls in the same order. They agree on epoch, version and ticket first, since they
  are notified at different moments. `vote` compares the calls of all workers. If they ran different modules, they get
  an error and not a wrong sum.
- After a worker of the node was lost, no further collective inside the node is begun in that step. Full units are
  gathered from the servers, gradients are dropped, and the vote is an abort. The next forward begins with groups of the
  workers present then (`NodeGroups.form`). A worker that replaces another begins there, too. If no worker comes back in
  time, all of the node fails, and the other nodes go on.
- After any other failure inside the node every call raises that error.
- Calls that must be in order inside the node go through one queue. Agreements go through a second group, so that they
  are not delayed by data.

Note: [On GPUs]
    The node's collectives are of device memory then, by NCCL: units are gathered into it and gradients averaged in it.
    Only a worker's own shards are copied to the host and back, once for each version and each gradient. gRPC needs them
    in host memory, which is page-locked. The copies are on a stream beside the caller's (`collectives.staging`). A
    shard that was uploaded stays in device memory, for backward too, unless CPUOffload offloads parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from axon_ps.collectives.staging import Staging
from axon_ps.collectives.work import Awaited
from axon_ps.errors import Disagreement
from axon_ps.parallel.fsdp.hybrid.calls import NodeCalls
from axon_ps.parallel.fsdp.hybrid.gradients import NodeGradients
from axon_ps.parallel.fsdp.hybrid.node_groups import NodeGroups
from axon_ps.parallel.fsdp.hybrid.parameters import NodeParameters
from axon_ps.parallel.fsdp.hybrid.ticket import NodeTicket
from axon_ps.parallel.fsdp.hybrid.view import NodeView
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.on_servers.server_runtime import ServerRuntime
from axon_ps.parallel.fsdp.steps import StepStatus
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Decision, DType, Hyper, OptimizerChange, OptimizerSpec, Outcome
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket


class NodeSteps:
    """The steps of a worker that shares its units with the other workers of its node.

    Args:
        steps: the worker's own.
        groups: the workers of the node.
        spec: the job's; a node is a replica in it.
        wires: by unit, the dtype in which it is gathered.
        num_servers: shard servers of the job.
        device: the device of the node's collectives; None = in host memory. See Note: [On GPUs].
        retain_on_device: retain shards in device memory too, once they were needed there.
        meter: counts their memory.

    Attributes:
        view: the view that the node's workers agreed on.
        parameters: gathered inside the node.
        gradients: averaged inside the node.
        device: as given.
    """

    def __init__(
        self,
        steps: StepClient,
        groups: NodeGroups,
        spec: JobSpec,
        wires: Sequence[DType],
        num_servers: int,
        *,
        device: torch.device | None = None,
        retain_on_device: bool = True,
        meter: Meter,
    ) -> None:
        self.device = (
            None if device is None else torch.empty(0, dtype=torch.uint8, device=device).device
        )  # with its number
        self._steps = steps
        self._staging = Staging()
        self._size = groups.data.world_size
        self._calls = NodeCalls(groups)
        self.view = NodeView(steps.view, self._calls)
        self.parameters = NodeParameters(
            steps.parameters,
            self.view,
            self._calls,
            spec,
            wires,
            num_servers,
            device=self.device,
            retain_on_device=retain_on_device,
            staging=self._staging,
            meter=meter,
        )
        self.gradients = NodeGradients(
            steps.gradients, self._calls, self.parameters, spec.precision.grad, self._staging
        )

    def register_optimizer(self, optimizer: OptimizerSpec) -> None:
        """See `StepClient.register_optimizer`."""
        self._steps.register_optimizer(optimizer)

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """See `StepClient.check_optimizer`."""
        self._steps.check_optimizer(optimizer)

    def agree(self) -> bool:
        """Agree on the newest (epoch, version) that any worker of the node knows. A forward begins with this.

        If a worker of the node was lost, this waits for it to be back, or for another in its place.

        Returns:
            True if the groups were formed again. Then units that a worker has are to be gathered again: the new worker
            has none, and all of them gather together.

        Raises:
            MemberLost: no worker came, and the job goes on without this node.
            Timeout, AxonError: as of `WorldNodeGroups.form`.

        After an error: the workers of the node do not agree; build the model again.
        """
        own, formed = self._steps.view, False
        while (rows := self._calls.exchange(own.latest)) is None:
            self._calls.form_again(own.job.timeout_s)
            self.parameters.make_shards()
            self.parameters.expected = None
            formed = True
        self.view.agreed = max((int(e), int(v)) for e, v in rows)
        own.wait_latest(self.view.agreed)  # pulls are of versions that this worker was notified of
        return formed

    def settled(self, generation: int) -> bool:
        """Return True if all workers of the node are in this generation, after `agree`.

        Otherwise wait until this worker is in the newest of their generations, and return False.
        """
        rows = self._calls.exchange([generation])
        if rows is None:
            return False
        newest = int(rows.max())
        self.view.job.wait_generation(newest, self.view.job.timeout_s)
        return bool((rows == newest).all())

    def ticket(self, began: tuple[int, int] | None = None, dealt: int | None = None) -> NodeTicket:
        """Return the ticket of the node's first worker: it is valid for all of them, or for none.

        It is void if any of them began at another position than the node agreed on, or than the present one, or is in
        another generation than `dealt`.
        """
        mine = self._steps.ticket(began, dealt)
        stale = mine.is_void or began not in (None, self.view.agreed)
        rows = self._calls.exchange([mine.generation, mine.step, mine.num_replicas, stale])
        if rows is None:
            return self._node_ticket(mine).void(f"the node's groups ended: {self._calls.group_error}")
        if any(row[3] for row in rows):
            return self._node_ticket(mine).void(
                mine.why_void or "the parameters changed since a worker of the node began its step"
            )
        generation, step, replicas = map(int, rows[0][:3])
        if mine.generation < generation:
            self.view.job.wait_generation(generation, self.view.job.timeout_s)
        replica = self._steps.view.me.replica
        return self._node_ticket(Ticket(generation=generation, step=step, replica=replica, num_replicas=replicas))

    def _node_ticket(self, shared: Ticket) -> NodeTicket:
        return NodeTicket(
            generation=shared.generation,
            step=shared.step,
            replica=shared.replica,
            num_replicas=shared.num_replicas * self._size,
            shared=shared,
        )

    def vote(
        self,
        ticket: Ticket,
        pushes: Sequence[Awaited],
        *,
        max_norm: float,
        hyper: Sequence[Hyper],
        commit: Mapping[str, str] | None = None,
        weight: float | None = None,
        untouched: Iterable[int] = (),
        withdrawn: bool = False,
        optimizer: OptimizerChange | None = None,
    ) -> Decision:
        """Vote as in `StepClient.vote`, once all workers of the node are found to have made the same calls.

        Raises:
            Disagreement: they have not; no worker has voted, and the step will not commit.
        """
        assert isinstance(ticket, NodeTicket)
        decision = None
        try:
            vote = partial(
                self._steps.vote,
                max_norm=max_norm,
                hyper=hyper,
                commit=commit,
                weight=weight,
                optimizer=optimizer,
                untouched=untouched,
            )
            decision = self._vote(ticket, pushes, vote, withdrawn=withdrawn)
        finally:
            self.parameters.settle(decision)
        if decision.outcome is Outcome.COMMIT:
            self.view.agreed = self.view.agreed[0], decision.version
            self.parameters.pull()
        return decision

    def _vote(
        self,
        ticket: NodeTicket,
        pushes: Sequence[Awaited],
        vote: Callable[..., Decision],
        *,
        withdrawn: bool,
    ) -> Decision:
        rows = self._calls.exchange([self._calls.take_digest()])
        if rows is None:
            void = ticket.shared.void(f"the node's groups ended: {self._calls.group_error}")
            return vote(void, ())
        if len({int(row[0]) for row in rows}) > 1:
            raise Disagreement(
                "the workers of this node used different units, or in another order, in this step; under HYBRID_SHARD "
                "they must run the same modules in the same order, since each of them has a shard of every unit"
            )
        return vote(ticket.shared, pushes, withdrawn=withdrawn)

    def copy_from(self, source: StepClient, weight: float) -> Decision:
        """Copy as in `StepClient.copy_from`: every worker of the node votes for it."""
        decision = self._steps.copy_from(source, weight)
        if decision.outcome is Outcome.COMMIT and self._calls.group_error is None:
            self.view.agreed = self.view.agreed[0], decision.version
            self.parameters.pull()
        return decision

    def expect(self, hyper: Sequence[Hyper] | None) -> None:
        """Expect these hyperparameters in the vote for this step, unclipped; None = expect nothing."""
        self.parameters.expected = None if hyper is None else tuple(hyper)

    def close(self) -> None:
        """End the calls inside the node. The groups are the world's, and stay."""
        self._calls.close()


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
        """See `Runtime.step_status`. It is the same for all workers of the node, except for their coordinates."""
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
