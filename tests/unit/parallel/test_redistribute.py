"""`Mesh.redistribute` moves data: every rank ends with the shard that slicing the full tensor would give it.

Tests of `parallel/redistribute.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.parallel.mesh import Mesh
from mock_ranks import close, on_ranks, rand

SHAPE = (5, 7, 3)


def shard(full: torch.Tensor, mesh: Mesh, placements: Any) -> torch.Tensor:
    """What DTensor's rule gives this rank: axis by axis, its chunk; of a sum, an unequal summand."""
    for axis, placement in zip(mesh.axes, placements, strict=True):
        n, i = mesh.size(axis), mesh.coordinate(axis)
        if isinstance(placement, Shard):
            chunks = full.chunk(n, placement.dim)
            empty = full.narrow(placement.dim, 0, 0)
            full = chunks[i] if i < len(chunks) else empty
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            full = full * (i + 1) / (n * (n + 1) / 2)
        elif isinstance(placement, Partial) and placement.reduce_op == "max":
            full = full - i
    return full


@pytest.mark.parametrize(("axes", "ranks"), [({"data": 3}, 3), ({"data": 2, "tensor": 3}, 6)])
def test_every_way_to_every_other(axes: dict[str, int], ranks: int) -> None:
    full = rand(*SHAPE)
    each = [Replicate(), Shard(0), Shard(1), Shard(-1), Partial()]
    ways = list(itertools.product(each, repeat=len(axes)))
    pairs = [(s, t) for s, t in itertools.product(ways, ways) if Partial() not in t]
    if len(axes) > 1:
        pairs = pairs[::3]  # 133 of the 400

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, **axes)
        for source, target in pairs:
            moved = mesh.redistribute(shard(full, mesh, source), source, target, shape=SHAPE)
            close(moved, shard(full, mesh, target), 1e-6)

    on_ranks(ranks, body)


def test_what_does_not_change_stays_and_the_rest_moves_as_little_as_it_can() -> None:
    full = rand(4, 4)

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, data=2, tensor=2)
        local = shard(full, mesh, (Shard(0), Shard(1)))
        assert mesh.redistribute(local, (Shard(0), Shard(1)), [Shard(-2), Shard(-1)]) is local
        before = mesh.group("data").sequence
        moved = mesh.redistribute(local, {"data": Shard(0), "tensor": Shard(1)}, {"data": Shard(0)})  # equal shards
        close(moved, shard(full, mesh, (Shard(0), Replicate())))
        assert mesh.group("data").sequence == before  # nobody else was asked
        across = mesh.redistribute(moved, {"data": Shard(0)}, {"data": Shard(1)})
        close(across, shard(full, mesh, (Shard(1), Replicate())))
        assert mesh.group("data").sequence == before + 1  # and of these once, by an all-to-all
        unchanged = mesh.redistribute(full, [Partial(), Shard(0)], [Partial(), Replicate()], shape=(8, 4))
        assert unchanged.shape == (8, 4)

    on_ranks(4, body)


def test_other_reductions() -> None:
    full = rand(4, 4)

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, data=3)
        local = shard(full, mesh, (Partial("max"),))
        close(mesh.redistribute(local, [Partial("max")], [Replicate()]), full)
        close(mesh.redistribute(full.clone(), [Partial("avg")], [Shard(0)]), shard(full, mesh, [Shard(0)]))
        with pytest.raises(InvalidRequest, match="only sums and averages have a gradient"):
            mesh.redistribute(local.requires_grad_(), [Partial("max")], [Replicate()])

    on_ranks(3, body)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (Partial(), Replicate()),
        (Partial(), Shard(2)),
        (Partial("avg"), Shard(0)),
    ],
    ids=str,
)
def test_gradients_go_back_the_way(source: Any, target: Any) -> None:
    full, weight = rand(*SHAPE), rand(*SHAPE, seed=1)

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, data=2)
        local = shard(full, mesh, [source]).clone().requires_grad_()
        moved = mesh.redistribute(local, [source], [target], shape=SHAPE)
        (moved * shard(weight, mesh, [target])).sum().backward()
        # The loss is sum(full * weight), of which this rank has computed its shard, or all of it.
        expected = (
            weight / 2
            if source == Partial("avg")
            else shard(weight, mesh, [source if source.is_shard() else Replicate()])
        )
        close(local.grad, expected)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("source", "target", "shape", "message"),
    [
        (
            [Shard(0)],
            [Replicate(), Replicate()],
            None,
            "2 placements were given; the mesh needs one for each of its axes: data",
        ),
        ({"tensor": Shard(0)}, {}, None, "a placement for 'tensor'; the mesh has the axes data"),
        ([Shard(2)], [Replicate()], None, r"the placement on data is Shard\(dim=2\) of a tensor of 2 dimensions"),
        (["shard"], [Replicate()], None, "the placement on data is 'shard'"),
        ([Replicate()], [Partial()], None, "can be made Partial by no collective"),
        ([Shard(0)], [Replicate()], (5, 4), r"this rank's shard is \[4, 4\]; of a tensor \[5, 4\] it should be \["),
    ],
)
def test_what_cannot_be(source: Any, target: Any, shape: Any, message: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidRequest, match=message):
            Mesh(group, data=2).redistribute(torch.ones(4, 4), source, target, shape=shape)

    on_ranks(2, body)


def test_parts_that_differ_without_a_shape_are_found() -> None:
    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, data=2)
        with pytest.raises(Disagreement):
            mesh.redistribute(torch.ones(2 + group.rank, 4), [Shard(0)], [Replicate()])
        with pytest.raises(Disagreement):
            mesh.redistribute(torch.ones(2 + group.rank, 4), [Shard(0)], [Shard(1)])

    on_ranks(2, body)


def test_a_rank_with_a_shard_of_another_shape_notifies_the_others_first() -> None:
    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, data=2, tensor=2)
        mine = torch.ones(2 - (group.rank == 3), 4)
        wrong = pytest.raises(InvalidRequest, match=r"this rank's shard is \[1, 4\]")
        notified = pytest.raises(Disagreement, match=r"rank 3.*this rank's shard is \[1, 4\]")
        if group.rank >= 2:
            with wrong if group.rank == 3 else notified:
                mesh.redistribute(mine, [Shard(0), Shard(0)], [Replicate(), Replicate()], shape=(8, 4))
        else:
            assert mesh.redistribute(mine, [Shard(0), Shard(0)], [Shard(0), Replicate()], shape=(8, 4)).shape == (4, 4)
        with pytest.raises(InvalidRequest, match="this rank's shard is"):  # nobody waits
            mesh.redistribute(mine, [Replicate(), Replicate()], [Replicate(), Shard(0)], shape=(8, 4))

    on_ranks(4, body)
