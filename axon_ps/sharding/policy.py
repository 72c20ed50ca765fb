"""The policy of a job: the replicas that wait for each other between steps. Policies are equal on every worker. Pure.

Owns the names and settings of the policies. Refuses to act: the coordinator admits and decides, the shard
servers sum and apply, the wrappers in `parallel` train.

    policy               a step is made of           a worker goes on when
    Synchronous          every replica's gradient    its step is decided
    BoundedStaleness(s)  one replica's gradient      its step is decided and no replica is more than s clocks behind
    Asynchronous         one replica's gradient      its step is decided
    LocalSteps(H)        every replica's progress    H local steps at once, then its step is decided; with a quorum the
                                                     others vote sooner, after the grace period

A *clock* counts the decided steps of one replica in a generation (Ho et al. 2013, stale synchronous parallel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from axon_ps.errors import InvalidRequest

MAX_STALENESS = 1 << 31
MAX_INNER_STEPS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of the policies. The module describes them.

    Attributes:
        asynchronous: whether each replica's gradient is a separate step.
        most_behind: the most clocks that the slowest replica may be behind a replica that goes on; None = any number.
        quorum: the fraction of the workers whose votes start the grace period; 0 = all workers are waited for.
        grace_s: length of the grace period, in seconds: then the other workers are asked to vote.
    """

    asynchronous: ClassVar[bool] = False

    @property
    def most_behind(self) -> int | None:
        """The most clocks by which the slowest replica may be behind another that goes on; None = any number."""
        return None

    @property
    def quorum(self) -> float:
        """The fraction of the workers whose votes start the grace period; 0 = all workers are waited for."""
        return 0.0

    @property
    def grace_s(self) -> float:
        """Seconds from the quorum's votes until the other workers are asked to come to the step."""
        return 0.0

    def __str__(self) -> str:
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        settings = ", ".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({settings})"


@dataclass(frozen=True, kw_only=True)
class Synchronous(Policy):
    """Every step is the average over all replicas. It is the default, and repeatable bit by bit."""


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Policy):
    """Each replica's gradient is a separate step, applied when it has arrived. Replicas do not wait for each other.

    Source: Dean et al. 2012 (downpour SGD), with complete gradients in one order on all servers.
    """

    asynchronous: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(Policy):
    """As `Asynchronous`, but a replica at clock c goes on only when the slowest is at c - max_staleness or later.

    With 0, no replica begins its next step before all have ended theirs. Source: Ho et al. 2013.

    Attributes:
        max_staleness: the most clocks that the slowest may be behind.

    Raises:
        InvalidRequest: it is negative, or too large for a message.
    """

    asynchronous: ClassVar[bool] = True
    max_staleness: int

    def __post_init__(self) -> None:
        if not 0 <= self.max_staleness <= MAX_STALENESS:
            raise InvalidRequest(
                f"max_staleness is {self.max_staleness}; it must be 0 to {MAX_STALENESS} (Asynchronous() has no bound)"
            )

    @property
    def most_behind(self) -> int | None:
        """`max_staleness`."""
        return self.max_staleness


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Policy):
    """Replicas train on their own copies and push the change of their parameters: local SGD (Stich 2019), DiLoCo.

    Steps are synchronous. The outer optimizer is the job's optimizer.

    Attributes:
        inner_steps: local steps between two steps of the job.
        quorum: the fraction of the workers whose votes start the grace period. After it, the others are asked to vote
            with the inner steps they have done. 0 = all workers are waited for.
        grace_s: length of the grace period, in seconds.

    Raises:
        InvalidRequest: one of them is out of range, or there is a grace period without a quorum.
    """

    inner_steps: int
    quorum: float = 0.0
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.quorum <= 1.0:
            raise InvalidRequest(f"quorum is {self.quorum}; it must be a fraction of the workers, from 0 (all) to 1")
        if not 0.0 <= self.grace_s < math.inf:
            raise InvalidRequest(f"grace_s is {self.grace_s}; it must be a number of seconds from 0 on")
        if self.grace_s and not self.quorum:
            raise InvalidRequest(f"grace_s is {self.grace_s}, and there is no quorum after which it would begin")
        if not 1 <= self.inner_steps <= MAX_INNER_STEPS:
            raise InvalidRequest(f"inner_steps is {self.inner_steps}; it must be 1 to {MAX_INNER_STEPS}")
