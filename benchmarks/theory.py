"""The bytes that have to cross the card of a worker's host in a step. Pure.

    shape legend: W = worker hosts, P = bytes of the parameters as they are sent, R = bytes of the parameters that
    are gathered again for backward, G = bytes of the gradients

Each host has one worker (HYBRID_SHARD: one replica, whose workers share memory), and every server has an equal part of
each unit. R is 0 except under FULL_SHARD. It is also 0 where a worker of axon_ps retains gathered parameters in host
memory: with CPUOffload.PARAMS, or if parameters are sent as differences (int4). FSDP2 gathers all blocks again, but not
the root. axon_ps also leaves out the last two blocks, which stay unsharded between forward and backward (Note: [Memory]
of the runtime).

- FSDP2: a host has 1/W of an all-gather, so it receives (W-1)/W and sends its own 1/W to W-1 others. A reduce-scatter
  is the same backwards. Together they are (W-1)/W (P + R + G) each way: 2P + G under FULL_SHARD, P + G under
  SHARD_GRAD_OP.
- HSDP of torch, with a replica on each host: all-gathers and reduce-scatters stay inside. The rest, G in all, is
  all-reduced: a reduce-scatter and an all-gather, 2 (W-1)/W G each way.
- axon_ps, servers with their own cards: a worker receives P + R and sends G.
- axon_ps, a server on each worker's host, which has 1/W of everything: for its worker a host receives (W-1)/W (P + R)
  and sends (W-1)/W G. For the other workers its server sends 1/W (P + R) to each, and receives 1/W G from each.
  Together they are (W-1)/W (P + R + G) each way. The host's own 1/W passes in memory.

gloo, as torch calls it, makes a reduce-scatter of an all-reduce, 2 (W-1)/W G. So FSDP2 is measured at up to 4/3 of this
under FULL_SHARD and 3/2 under SHARD_GRAD_OP.
"""

from __future__ import annotations

from dataclasses import dataclass

RETAINED_BLOCKS = 2
"""Number of last blocks that axon_ps does not reshard between forward and backward."""


@dataclass(frozen=True)
class Sizes:
    """A model of equal blocks, in elements.

    Attributes:
        blocks: number of blocks.
        block: elements of each block.
        root: elements outside all blocks.
    """

    blocks: int
    block: int
    root: int

    @property
    def all(self) -> int:
        """Elements of the model."""
        return self.blocks * self.block + self.root


def gathered_again(sizes: Sizes, strategy: str, *, ours: bool, kept: bool = False) -> int:
    """Return the elements that a worker gathers a second time in a step; 0 where it retains them in host memory."""
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
    """Return the bytes that the card of each worker's host receives and sends in a step.

    Args:
        sizes: sizes of the model.
        strategy: "full_shard", "shard_grad_op" or "hybrid_shard".
        ours: True for axon_ps, False for FSDP2.
        hosts: number of worker hosts.
        own_servers: whether each of these has a shard server; else the servers have their own cards.
        element_bytes: bytes of an element as it is sent.
        kept: whether a worker retains gathered parameters in host memory.
    """
    gathered = (sizes.all + gathered_again(sizes, strategy, ours=ours, kept=kept)) * element_bytes
    pushed = sizes.all * element_bytes
    if ours and not own_servers:
        return gathered, pushed
    both = 2 * pushed if strategy == "hybrid_shard" and not ours else gathered + pushed
    remote = both * (hosts - 1) / hosts
    return remote, remote
