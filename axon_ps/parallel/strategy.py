"""The sharding strategies: what a worker keeps between uses."""

from __future__ import annotations

import enum


class ShardingStrategy(enum.Enum):
    """What a worker keeps, what it moves, and where the step happens.

    FULL_SHARD (ZeRO-3): nothing is kept between units; a unit is gathered before its forward and again before its
    backward, its gradient is pushed, the step happens on the servers.

    SHARD_GRAD_OP (ZeRO-2): full parameters are kept; gradients are pushed, the step happens on the servers, what
    changed is pulled before the next forward.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
