"""`ClusterConfig`: the services of a job on Ray, as the user asks for them. It imports nothing of Ray."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.errors import ConfigurationError
from axon_ps.rpc.auth.tokens import new_secret
from axon_ps.rpc.security import Security
from axon_ps.storage.files import absolute

STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
SHARED_STATE = "etcd:"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Coordinator and shard servers of one job.

    Attributes:
        shards: shard servers.
        job: the job's name; empty = a random one. If `state` has a job of that name, it goes on.
        replication: number of them that hold each slice; 0 = two, if there are as many.
        min_workers: the fewest workers to continue with when some are lost.
        resources_per_shard: the resources that Ray reserves for a shard server; "CPU" is also its number of threads.
        placement: Ray's strategy for shard servers: "SPREAD" puts them on as many nodes as there are, "STRICT_SPREAD"
            refuses to put two on one.
        state: the store of the coordinator's state: empty = a file on its node, "memory", a path, or
            "etcd:HOST:PORT,...", which several coordinators have together.
        coordinators: number of coordinators, more than 1 only if `state` is etcd. One leads, and the others stand by.
            They are on different nodes if there are as many.
        resume: checkpoint to start from.
        checkpoint_dir: the directory to which the job writes checkpoints by itself, and from which it resumes; empty =
            it does not.
        checkpoint_every: the interval: steps, as "500", or a time, as "10m"; empty = it only resumes.
        checkpoint_limit: number of them that remain.
        checkpoint_roots: the directories (paths or URIs) in which the services open checkpoints; empty = if their nodes
            are on several hosts, `checkpoint_dir`, `resume` and the directories that driver and services were started
            in; on one host, where only its user can call them, all.
        lease_s: seconds of silence after which a member is lost.
        join_timeout_s: seconds that the job waits for lost workers when fewer than `min_workers` are left.
        step_timeout_s: seconds that a worker may be absent from a step before it is set aside.
        start_timeout_s: seconds that Ray may take to place and start everything.
        security: the job's secret (empty = a random one), by which nodes on several hosts use mutual TLS; or TLS files,
            found by these paths on every node; or `insecure=True`: the network is trusted.
        plugins: modules that the services import; see docs/extending.md.
        log_level: the lowest level that the services log. Ray shows it in the driver.

    Raises:
        ConfigurationError: a value cannot work.
    """

    shards: int = 2
    job: str = ""
    replication: int = 0
    min_workers: int = 1
    resources_per_shard: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement: str = "SPREAD"
    state: str = ""
    coordinators: int = 1
    resume: str = ""
    checkpoint_dir: str = ""
    checkpoint_every: str = ""
    checkpoint_limit: int = 3
    checkpoint_roots: tuple[str, ...] = ()
    lease_s: float = 5.0
    join_timeout_s: float = 600.0
    step_timeout_s: float = math.inf
    start_timeout_s: float = 60.0
    security: Security = field(default_factory=Security)
    plugins: tuple[str, ...] = ()
    log_level: str = "WARNING"

    def __post_init__(self) -> None:
        if self.placement not in STRATEGIES:
            raise ConfigurationError(f"placement is {self.placement!r}; it must be one of {', '.join(STRATEGIES)}")
        if self.coordinators < 1 or (self.coordinators > 1 and not self.state.startswith(SHARED_STATE)):
            raise ConfigurationError(
                f"coordinators is {self.coordinators} and state {self.state!r}; several need a state that they have "
                "together: etcd:HOST:PORT"
            )
        if not 0 < self.start_timeout_s < math.inf:
            raise ConfigurationError(f"start_timeout_s is {self.start_timeout_s}; it must be positive and finite")
        self.coordinator(0)

    def coordinator(self, world_size: int) -> CoordinatorConfig:
        """Return the coordinator's configuration.

        Args:
            world_size: workers that it starts with; 0 = as the first of them requests.
        """
        directory = absolute(self.checkpoint_dir) if self.checkpoint_dir else ""
        return CoordinatorConfig(
            job=self.job or "unnamed",
            world_size=world_size,
            num_shards=self.shards,
            replication=self.replication,
            min_workers=self.min_workers,
            lease_s=self.lease_s,
            join_timeout_s=self.join_timeout_s,
            step_timeout_s=self.step_timeout_s,
            resume=absolute(self.resume) if self.resume else "",
            checkpoints=CheckpointPolicy.of(directory, self.checkpoint_every, self.checkpoint_limit),
        )

    def named(self) -> ClusterConfig:
        """Return a copy with a name of the job and a token, random ones where none are given."""
        token = next(iter(self.security.tokens()), "") or new_secret()
        security = dataclasses.replace(self.security, token=token, token_file="")  # other nodes may lack the file
        return dataclasses.replace(self, job=self.job or f"ray-{secrets.token_hex(4)}", security=security)
