"""What has to cross the card of a worker's host in a step. Pure.

    shape legend: W = worker hosts, P = bytes of the parameters as they travel, R = of those that are gathered again for
    backward, G = of the gradients

Each host has one worker (HYBRID_SHARD: one replica, whose workers share memory), and every server as much of each unit.
R is 0 but under FULL_SHARD, and where a worker of ours keeps what it has gathered in host memory: with
CPUOffload.PARAMS, or if parameters travel as differences (int4).
FSDP2 gathers all blocks again and not the root; ours leaves out the last two blocks, too, which stay unsharded between
forward and backward (Note: [Memory] of the runtime).

- FSDP2: of an all-gather a host has 1/W, so it receives (W-1)/W and sends its own 1/W to W-1 others. A reduce-scatter
  is the same backwards. Together (W-1)/W (P + R + G) each way; 2P + G under FULL_SHARD, P + G under SHARD_GRAD_OP.
- HSDP of torch, a replica on each host: all-gathers and reduce-scatters stay inside, and what is left, G in all, is
  all-reduced: a reduce-scatter and an all-gather, 2 (W-1)/W G each way.
- Ours, servers with cards of their own: a worker receives P + R and sends G.
- Ours, a server on each worker's host, which has 1/W of everything: for its worker a host receives (W-1)/W (P + R) and
  sends (W-1)/W G; for the other workers its server sends them 1/W (P + R) each and receives 1/W G from each. Together
  (W-1)/W (P + R + G) each way. Its own 1/W passes in memory.

gloo as torch calls it makes a reduce-scatter of an all-reduce, 2 (W-1)/W G, so FSDP2 is measured at up to 4/3 of this
under FULL_SHARD and 3/2 under SHARD_GRAD_OP.
"""

from __future__ import annotations

from dataclasses import dataclass

RETAINED_BLOCKS = 2
"""So many of the blocks that forward used last ours does not reshard before backward."""


@dataclass(frozen=True)
class Sizes:
    """A model of equal blocks, in elements.

    Attributes:
        blocks: how many there are.
        block: elements of each.
        root: elements outside of all blocks.
    """

    blocks: int
    block: int
    root: int

    @property
    def all(self) -> int:
        """Elements of the model."""
        return self.blocks * self.block + self.root


def gathered_again(sizes: Sizes, strategy: str, *, ours: bool, kept: bool = False) -> int:
    """Elements that a worker gathers a second time in a step; none where it has kept them in host memory."""
    if strategy != "full_shard" or kept:
        return 0
    return max(0, sizes.blocks - RETAINED_BLOCKS * ours) * sizes.block


def card_bytes(
    sizes: Sizes,
    strategy: str,
    *,
    ours: bool,
    hosts: int,
    own_servers: bool,
    element_bytes: float,
    kept: bool = False,
) -> tuple[float, float]:
    """Bytes that the card of each worker's host receives and sends in a step.

    Args:
        sizes: of the model.
        strategy: "full_shard", "shard_grad_op" or "hybrid_shard".
        ours: this library; else FSDP2.
        hosts: of workers.
        own_servers: whether each of them has a shard server; else these have cards of their own.
        element_bytes: bytes of an element as it travels.
        kept: whether a worker keeps in host memory what it has gathered.
    """
    gathered = (sizes.all + gathered_again(sizes, strategy, ours=ours, kept=kept)) * element_bytes
    pushed = sizes.all * element_bytes
    if ours and not own_servers:
        return gathered, pushed
    both = 2 * pushed if strategy == "hybrid_shard" and not ours else gathered + pushed
    remote = both * (hosts - 1) / hosts
    return remote, remote
