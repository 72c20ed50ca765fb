"""The sharding strategies: what a worker keeps between uses."""

from __future__ import annotations

import enum


class ShardingStrategy(enum.Enum):
    """What a worker keeps, what it moves, and where the step happens.

    FULL_SHARD (ZeRO-3): nothing is kept between units; a unit is gathered before its forward and again before its
    backward, its gradient is pushed, the step happens on the servers.

    SHARD_GRAD_OP (ZeRO-2): full parameters are kept; gradients are pushed, the step happens on the servers, what
    changed is pulled before the next forward. While gradients are not clipped it is pulled right behind each push, into
    a second copy of the parameters in their wire dtype, which counts once the step has committed. After `step()` a
    parameter shows its new value from the next forward on, or inside `summon_full_params()`.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
