"""The configuration of a coordinator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """The settings of a job.

    Attributes:
        job: its name.
        world_size: workers it starts with; 0 = as the first worker requests.
        num_shards: shard servers it begins with. Units are cut into slices for this many.
        replication: number of shard servers that hold each slice; 0 = 2 if there are two or more, else 1.
        min_workers: number of workers that it needs after it was complete once; None = world_size.
        lease_s: seconds for which a silent member stays a member.
        join_timeout_s: seconds that workers wait for lost members to be replaced before their sessions end with an
            error; inf = for ever.
        step_timeout_s: seconds for which workers in a step wait for an absent one. Then that worker is
            set aside, if as many as the job needs remain. inf = for ever.
        resume: a checkpoint, or a directory of checkpoints, that the job begins with; empty = a worker uploads first
            values.
        checkpoints: the policy of automatic checkpoints and restores.
        begin_anew: text for people about a way to begin the job anew; empty = none is shown.
        in_worker: whether workers run in the coordinator's process. Delays of its event loop are normal then.
    """

    job: str = "default"
    world_size: int = 0
    num_shards: int = 1
    replication: int = 0
    min_workers: int | None = None
    lease_s: float = 5.0
    join_timeout_s: float = 600.0
    step_timeout_s: float = math.inf
    resume: str = ""
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    begin_anew: str = ""
    in_worker: bool = False

    def __post_init__(self) -> None:
        for what, value, least in (
            ("world_size", self.world_size, 0),
            ("num_shards", self.num_shards, 1),
            ("replication", self.replication, 0),
        ):
            if value < least:
                raise ConfigurationError(f"{what} is {value}; it must be at least {least}")
        if self.min_workers is not None and self.min_workers < 1:
            raise ConfigurationError(f"min_workers is {self.min_workers}; it must be at least 1")
        if self.min_workers is not None and self.world_size and self.min_workers > self.world_size:
            raise ConfigurationError(
                f"min_workers is {self.min_workers}, more than world_size, which is {self.world_size}"
            )
        if self.replication > self.num_shards:
            raise ConfigurationError(
                f"replication is {self.replication}, and there are {self.num_shards} shard servers; start as many"
            )
        for what, seconds in (
            ("lease_s", self.lease_s),
            ("join_timeout_s", self.join_timeout_s),
            ("step_timeout_s", self.step_timeout_s),
        ):
            if not seconds > 0:
                raise ConfigurationError(f"{what} is {seconds}; it must be more than 0")
        if math.isinf(self.lease_s):
            raise ConfigurationError("lease_s is infinite; a member that froze would never be noticed")
        if not self.job or not self.job.isprintable():
            raise ConfigurationError(f"the job is called {self.job!r}; give it a printable name")

    @property
    def copies(self) -> int:
        """The number of shard servers that shall hold each slice."""
        return self.replication or min(2, self.num_shards)
