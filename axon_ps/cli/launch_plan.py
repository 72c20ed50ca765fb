"""What a launch consists of: everything that `axon-ps run` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything `axon-ps run` was asked to do.

    Attributes:
        program: arguments for Python that run the user's program.
        nproc_per_node: workers on this node.
        nnodes: nodes of the job.
        node_rank: which of them we are; -1 = whichever, the coordinator gives out the ranks.
        shards: shard servers of the job that we and our like on other nodes start; 0 = they are elsewhere.
        min_workers: least workers to go on with; None = all.
        step_timeout_s: how long a step waits for a worker that takes no part; None = for ever.
        max_restarts: how often each worker of this node is started again when it fails.
        standby: processes of this node that wait, everything imported, for a worker's place.
        master_addr: where node 0 is.
        master_port: port for torch.distributed's own store; 0 = any free one.
        coordinator_port: port of the embedded coordinator; 0 = any free one.
        host: address that embedded services listen on.
        advertise: where other nodes reach our shard servers; empty = as they find out themselves.
        state: the embedded coordinator's state store.
        resume: checkpoint to start from, or empty.
        connect_timeout_s: how long to wait for a coordinator that is not ours.
        token: the job's token.
    """

    program: tuple[str, ...]
    nproc_per_node: int
    nnodes: int
    node_rank: int
    shards: int
    min_workers: int | None
    step_timeout_s: float | None
    max_restarts: int
    standby: int
    master_addr: str
    master_port: int
    coordinator_port: int
    host: str
    advertise: str
    state: str
    resume: str
    connect_timeout_s: float
    token: str

    @property
    def world_size(self) -> int:
        """Workers of the job."""
        return self.nnodes * self.nproc_per_node

    @property
    def shards_here(self) -> int:
        """Shard servers of this node: the nodes take turns, so that every network card gets its share."""
        return len(range(max(self.node_rank, 0), self.shards, self.nnodes))
