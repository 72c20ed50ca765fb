"""The sharding strategies and CPU offload: the parameters that stay on a worker between uses, and their memory."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.policy import LocalSteps, Policy
from axon_ps.types import EACH_NODE, EACH_WORKER, Grouping, Member


class ShardingStrategy(enum.Enum):
    """The parameters that stay on a worker, the bytes that it moves, and the process that makes the step.

    FULL_SHARD (ZeRO-3): parameters are resharded after each use. A unit is gathered before its forward and again before
    its backward. Its gradient is pushed, and the step is made on the servers.

    SHARD_GRAD_OP (ZeRO-2): parameters stay unsharded. Gradients are pushed, the step is made on the servers, and
    changed values are pulled before the next forward. While gradients are not clipped, values on servers of other hosts
    are pulled right behind each push. They come into a second copy in their wire dtype if they must be cast or copied
    to a GPU, else over the old values. They count once the step has committed. The new values can be read from the next
    forward on, or inside `summon_full_params()`.

    HYBRID_SHARD: the workers of a node are one replica. Each of G workers has 1/G of every unit, in the wire dtype. A
    unit is gathered inside the node, and its gradient is averaged there. Each worker pushes and pulls its own shard.
    The step is made on the servers. The workers of a node run the same modules in the same order (on different data),
    as under torch's FSDP. With `intra_node_size=G` and a multiple of G workers on a host, each G of them are a node.

    NO_SHARD (DDP): every worker has all parameters, and the servers none. Gradients are averaged over the workers while
    backward runs, and are in `param.grad` after it. The step is that of a local optimizer, torch's or ours.

    ZERO_1, ZERO_2, ZERO_3 are other names of these. ZeRO-1 shards only the optimizer's state. Here that is on the
    servers in every strategy that uses them. SHARD_GRAD_OP comes closest, since parameters stay unsharded in it.
    In these strategies a gradient is on no worker once it is sent. For averages in `param.grad` use NO_SHARD.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    ZERO_1 = SHARD_GRAD_OP
    ZERO_2 = SHARD_GRAD_OP  # noqa: PIE796  (an alias)
    ZERO_3 = FULL_SHARD


class CPUOffload(enum.Enum):
    """The arrays that are in host memory between uses.

    NONE: nothing beyond the strategy. FULL_SHARD then gathers a unit from the servers twice a step.

    PARAMS: a copy of the parameters in their wire dtype stays in host memory (pinned if there is a GPU). Under
    FULL_SHARD and SHARD_GRAD_OP units are gathered from it for backward, and no unit stays on the device between uses.
    A step then moves a unit's bytes twice over the network, not three times as under FULL_SHARD. Frozen units are sent
    once. Under HYBRID_SHARD a worker's shard is on the host in any case. Under NO_SHARD the parameters and their
    gradients are on the host, and each unit is copied to the device for its forward and for its backward.

    FULL: as PARAMS. Gradients that wait for `no_sync()` to end, or for a step, are in host memory, too.

    OPTIMIZER_STATES: the optimizer's state is in host memory, as it always is on shard servers. Under NO_SHARD the
    parameters that the optimizer updates, and with them its state, are on the host.
    """

    NONE = "none"
    PARAMS = "params"
    FULL = "full"
    OPTIMIZER_STATES = "optimizer_states"

    @property
    def offloads_params(self) -> bool:
        """True if parameters have a copy in host memory."""
        return self in (CPUOffload.PARAMS, CPUOffload.FULL)

    @property
    def stages_grads(self) -> bool:
        """True if waiting gradients are on the host."""
        return self is CPUOffload.FULL


def check_sub_group(size: int, world_size: int, strategy: ShardingStrategy) -> None:
    """Refuse a group of some of the world's workers, if the strategy needs all of them.

    Args:
        size: workers of the group.
        world_size: workers of the world.
        strategy: the strategy.

    Raises:
        InvalidRequest: the strategy's steps are made on the servers.
    """
    if strategy is not ShardingStrategy.NO_SHARD:
        raise InvalidRequest(
            f"the group is a sub-group, of {size} of the world's {world_size} workers, and a step of {strategy.name} "
            "takes all workers of the world: the servers make it once every worker has sent its gradients. Pass the "
            "world; or, along one axis of a mesh, call fully_shard(module, mesh=mesh['dp']), or use "
            "ShardingStrategy.NO_SHARD or DistributedDataParallel"
        )


def checked_policy(policy: Policy, strategy: ShardingStrategy, offload: CPUOffload) -> Policy:
    """Return the policy, if it goes with the strategy.

    Raises:
        InvalidRequest: it does not.
    """
    if isinstance(policy, LocalSteps):
        raise InvalidRequest(
            f"{policy} trains a replica on each worker; use axon_ps.parallel.DiLoCo or LocalSGD for it"
        )
    retains = strategy is ShardingStrategy.SHARD_GRAD_OP or (
        strategy is ShardingStrategy.FULL_SHARD and offload.offloads_params
    )
    if policy.asynchronous and not retains:
        raise InvalidRequest(
            f"{policy} needs in backward the parameters that forward saw; use ShardingStrategy.SHARD_GRAD_OP, or "
            f"FULL_SHARD with CPUOffload.PARAMS or FULL, not {strategy.name}"
        )
    return policy


def checked_node_size(size: int | None, strategy: ShardingStrategy, members: Sequence[Member]) -> int:
    """Return the number of workers that share a unit inside a node; 1 except under HYBRID_SHARD.

    Args:
        size: the number given; None = as many as a node has. If a host has a multiple of it, so many workers of the
            host, those of consecutive ranks, count as a node.
        strategy: the strategy.
        members: the workers of the world.

    Raises:
        InvalidRequest: a host has no multiple of it, or a size was given for another strategy.
    """
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        if size is not None:
            raise InvalidRequest(f"intra_node_size is for HYBRID_SHARD; the strategy is {strategy.name}")
        return 1
    workers = Counter(member.node for member in members)
    size = next(iter(workers.values())) if size is None else size
    if size < 1 or len(members) % size:
        raise InvalidRequest(
            f"intra_node_size is {size} and the world has {len(members)} workers; the world must be a multiple of it"
        )
    if wrong := {node: n for node, n in workers.items() if n % size}:
        node, n = next(iter(wrong.items()))
        raise InvalidRequest(
            f"intra_node_size is {size}, but node {node!r} has {n} workers; every node must have {size}, or a multiple "
            "(a node is a host, or named by AXON_PS_NODE)"
        )
    if size not in workers.values():
        groups = Counter((member.node, member.rank // size) for member in members)
        if divided := next((node for (node, _), n in groups.items() if n != size), None):
            ranks = [member.rank for member in members if member.node == divided]
            raise InvalidRequest(
                f"intra_node_size is {size}, and node {divided!r} has ranks {ranks}; {size} workers of a host are a "
                f"node if their ranks follow each other, from a multiple of {size} on"
            )
    return size


def grouping_of(strategy: ShardingStrategy, node_size: int, members: Sequence[Member]) -> Grouping:
    """Return the workers that make a replica together, for a node size that was checked."""
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        return EACH_WORKER
    most = max(Counter(member.node for member in members).values())
    return EACH_NODE if most == node_size else Grouping(by_node=True, size=node_size)
