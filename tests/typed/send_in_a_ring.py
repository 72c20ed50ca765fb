"""Messages between workers: a ring, an exchange, a batch of messages, and objects."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import axon_ps
from axon_ps import P2POp, Work


def main(world: axon_ps.World) -> list[int]:
    """Pass values around; return the ranks of all workers."""
    right, left = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    data, other = torch.full((3,), float(world.rank)), torch.empty(3)

    received = assert_type(axon_ps.sendrecv(data, right, left), torch.Tensor)
    assert received[0] == left
    sending = assert_type(axon_ps.isend(data, dst=right), Work[None])
    assert assert_type(axon_ps.recv(other, src=left), int) == left
    sending.wait()
    sent = assert_type(axon_ps.send(data, right, async_op=True), Work[None])
    made = assert_type(axon_ps.recv(src=left, shape=3, dtype=np.float32), npt.NDArray[Any])
    sent.wait()
    works = axon_ps.batch_isend_irecv(
        [P2POp(axon_ps.isend, data, right, tag=1), P2POp(axon_ps.irecv, other, left, tag=1)]
    )
    for work in works:
        work.wait()

    group = world.default_group
    pending = assert_type(group.send(made, dst=right, tag=2, async_op=True), Work[None])
    assert_type(group.recv(made, src=left, tag=2), int)
    assert_type(group.send(made, dst=right, tag=3, async_op=True), Work[None])
    arriving = assert_type(group.recv(shape=[3], src=left, tag=3, async_op=True), Work[npt.NDArray[Any]])
    assert arriving.wait().shape == (3,)
    pending.wait()

    names = assert_type(axon_ps.all_gather_object(f"worker {world.rank}"), list[str])
    settings = assert_type(axon_ps.broadcast_object_list([{"lr": 0.1}], src=0), list[dict[str, float]])
    assert len(names) == world.world_size
    assert settings[0]["lr"] == 0.1
    assert_type(axon_ps.gather_object(world.rank, dst=0), list[int] | None)
    seed = assert_type(world.agree("seed", 7), int)
    return [seed, *assert_type(world.gather_json(world.rank), list[int])]


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))
