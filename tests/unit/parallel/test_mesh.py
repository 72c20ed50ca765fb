"""`Mesh`: coordinates, groups, flattened groups, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import axon_ps
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.parallel.mesh import Mesh
from mock_ranks import on_ranks


def test_groups_and_coordinates_are_those_of_the_grid() -> None:
    sizes = {"pipeline": 2, "data": 3, "tensor": 2}
    grid = np.arange(12).reshape(2, 3, 2)

    def body(group: ProcessGroup) -> None:
        mesh = Mesh(group, pipeline=2, data=-1, tensor=2)
        assert dict(mesh.axes) == sizes
        assert repr(mesh) == "Mesh(pipeline=2, data=3, tensor=2)"
        p, d, t = (mesh.coordinate(a) for a in sizes)
        assert grid[p, d, t] == group.rank == mesh.rank
        assert mesh.coordinates == {"pipeline": p, "data": d, "tensor": t}
        lines = {
            ("pipeline",): grid[:, d, t],
            ("data",): grid[p, :, t],
            ("tensor",): grid[p, d],
            ("pipeline", "tensor"): grid[:, d].reshape(-1),
            ("data", "tensor"): grid[p].reshape(-1),
        }
        for axes, line in lines.items():
            own = mesh.group(*axes)
            assert own is mesh.group(*reversed(axes))
            assert own.ranks == tuple(line)
            assert own.all_gather(np.array([group.rank])).tolist() == line.tolist()
            assert mesh.size(*axes) == line.size
        assert [mesh.group(a).rank for a in sizes] == [p, d, t]
        assert mesh.group("tensor", "data", "pipeline") is group
        assert mesh.rank_at(pipeline=1) == grid[1, d, t]
        assert mesh.rank_at() == group.rank

    on_ranks(12, body)


def test_one_group_makes_many_meshes() -> None:
    def body(group: ProcessGroup) -> list[float]:
        sums = []
        for _ in range(2):  # the same axes again: other groups
            mesh = Mesh(group, data=2, tensor=2)
            line = mesh.group("data").new_group([0, 1])
            sums.append(float(line.all_reduce(np.array([float(group.rank)]))[0]))
        return sums

    assert on_ranks(4, body) == [[2.0, 2.0], [4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, "places for 3 workers; the group has 1"),
        ({"data": -1, "tensor": 2}, "places for 2 workers; the group has 1"),
        ({"data": -1, "tensor": -1}, "at most one of them -1"),
        ({"data": 0}, "sizes from 1"),
        ({}, "at least one axis"),
        ({"a" * 600: 1}, "names of the axes are too long"),
    ],
)
def test_sizes_that_cannot_be_are_refused(axes: dict[str, int], message: str) -> None:
    with axon_ps.World.mock(1)[0] as world, pytest.raises(InvalidRequest, match=message):
        Mesh(world.default_group, **axes)


def test_axes_that_are_not_there_are_refused() -> None:
    with axon_ps.World.mock(1)[0] as world:
        mesh = Mesh(world.default_group, data=1, tensor=1)
        for axes in (("pipe",), ("data", "data"), ()):
            with pytest.raises(InvalidRequest, match=r"Mesh\(data=1, tensor=1\)"):
                mesh.group(*axes)
        with pytest.raises(InvalidRequest, match="'pipe'"):
            mesh.coordinate("pipe")
        with pytest.raises(InvalidRequest, match="goes from 0 to 0"):
            mesh.rank_at(data=1)


def test_members_that_ask_for_different_meshes_are_told() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(Disagreement, match=r"Mesh\(data=2, tensor=1\).*Mesh\(data=1, tensor=2\)"):
            Mesh(group, data=2 - group.rank, tensor=1 + group.rank)
        assert Mesh(group, data=2).group("data").world_size == 2

    on_ranks(2, body)
