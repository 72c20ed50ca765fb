"""Collectives on arrays of numpy and torch: at once, in the background, and as the program decides."""

from __future__ import annotations

from typing import TypeAlias, assert_type

import numpy as np
import numpy.typing as npt
import torch

import axon_ps
from axon_ps import ProcessGroup, ReduceOp, Work

Floats: TypeAlias = npt.NDArray[np.float32]


def main(world: axon_ps.World, background: bool = True) -> float:
    """Reduce and gather; return a sum that every worker has."""
    numbers: Floats = np.full(4, world.rank, np.float32)
    tensor = torch.full((4,), float(world.rank))

    assert_type(axon_ps.all_reduce_sum(numbers), Floats)
    assert_type(axon_ps.all_reduce_max(tensor, world), torch.Tensor)
    work = assert_type(axon_ps.all_reduce_mean(tensor, async_op=True), Work[torch.Tensor])
    assert_type(work.wait(timeout_s=30), torch.Tensor)
    either = assert_type(axon_ps.all_gather(numbers, async_op=background), Floats | Work[Floats])
    gathered = either.wait() if isinstance(either, Work) else either
    mine = assert_type(axon_ps.reduce_scatter_mean(gathered), Floats)
    assert_type(axon_ps.broadcast_from(numbers, 0), Floats)
    assert_type(axon_ps.gather_tensor(tensor, dst=0), torch.Tensor | None)
    assert_type(axon_ps.scatter_tensor(gathered, src=0), Floats)
    assert_type(axon_ps.all_to_all(gathered), Floats)
    assert_type(axon_ps.sync_gradient(tensor), torch.Tensor)
    axon_ps.sync_gradients([tensor, numbers, None])
    assert_type(axon_ps.barrier(async_op=True), Work[None]).wait()

    group = assert_type(world.default_group, ProcessGroup)
    assert_type(group.all_reduce(numbers, "sum"), Floats)
    assert_type(group.all_reduce(numbers, torch.distributed.ReduceOp.SUM, async_op=True), Work[Floats]).wait()
    assert_type(group.all_reduce_each([tensor, tensor + 1], ReduceOp.AVERAGE), list[torch.Tensor])
    assert_type(group.reduce(numbers, dst=0, op="max"), Floats)
    assert_type(group.broadcast(tensor, src=0), torch.Tensor)
    assert_type(group.gather(numbers, dst=0, async_op=True), Work[Floats | None]).wait()
    out = np.empty_like(numbers)
    assert_type(group.scatter(gathered if group.rank == 0 else None, src=0, out=out), Floats)
    assert_type(group.new_group([0]), ProcessGroup)
    total: float = mine.sum().item()
    return total


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
