"""The settings of one `axon-ps run`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of one `axon-ps run`, checked.

    Attributes:
        program: arguments for Python that run the user's program.
        nproc_per_node: workers on this node.
        nnodes: nodes of the job.
        node_rank: number of this node; -1 = not given, the coordinator assigns the ranks.
        shards: shard servers of the job, which the launches on all nodes start together; 0 = they run elsewhere.
        min_workers: the fewest workers to continue with; None = all.
        step_timeout_s: seconds that workers wait in a step for a worker that takes no part; None = for ever.
        max_restarts: most restarts of each worker of this node after it fails.
        standby: processes of this node that have imported everything and wait to replace a worker.
        master_addr: address of node 0.
        master_port: port for torch.distributed's own store; 0 = any free one.
        coordinator_port: port of the embedded coordinator; 0 = any free one.
        host: address that embedded services listen on.
        advertise: address at which other nodes reach this node's shard servers; empty = found automatically.
        state: the embedded coordinator's state store; empty = a file that goes with the launch.
        resume: checkpoint to start from, or empty.
        checkpoint_dir: directory in which the embedded coordinator writes checkpoints by itself; empty = none.
        checkpoint_every: steps or time between two of them, as the user gave it.
        checkpoint_limit: number of them that remain.
        proxy: whether this node's workers share one session with the coordinator.
        replication: number of shard servers that hold each slice; 0 = two, if there are as many.
        connect_timeout_s: seconds to wait for a coordinator that this launch does not start.
        token: the job's secret, or a token of a role; empty = none.
        tls: whether its processes use mutual TLS by the job's own authority, on loopback, too.
        http_port: port of the embedded coordinator's HTTP endpoint; shard servers of this node have the next ones, then
            its workers. 0 = any free one for each, None = there are none.
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
    checkpoint_dir: str
    checkpoint_every: str
    checkpoint_limit: int
    proxy: bool
    replication: int
    connect_timeout_s: float
    token: str
    tls: bool
    http_port: int | None = None

    @property
    def world_size(self) -> int:
        """Workers of the job."""
        return self.nnodes * self.nproc_per_node

    @property
    def has_state(self) -> bool:
        """True if the coordinator's state may have the job from a launch before."""
        return self.state not in ("", "memory")

    def http_port_of(self, index: int) -> int | None:
        """Return the HTTP port of a shard server by its index on this node; the next index is the workers'."""
        return self.http_port and self.http_port + 1 + index

    @property
    def shards_here(self) -> int:
        """Number of shard servers of this node. Nodes get them round-robin, so all network cards share the traffic."""
        return len(range(max(self.node_rank, 0), self.shards, self.nnodes))
