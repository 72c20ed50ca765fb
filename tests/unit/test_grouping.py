"""The workers that make a replica together, and the numbers of replicas."""

from __future__ import annotations

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.types import EACH_WORKER, MAX_RANKS, Grouping, Member, Role, numbered, replica_of


def workers(*ranks: int, per_node: int = 4) -> list[Member]:
    return [
        Member(role=Role.WORKER, rank=r, incarnation=f"{r:032x}", node=f"node{r // per_node}", joined=1) for r in ranks
    ]


def replicas(grouping: Grouping, *ranks: int, per_node: int = 4) -> tuple[list[int], int]:
    found, count = numbered(workers(*ranks, per_node=per_node), grouping)
    return [m.replica for m in found], count


@pytest.mark.parametrize(
    ("grouping", "expected", "count"),
    [
        (EACH_WORKER, [0, 1, 2, 3, 4, 5], 6),
        (Grouping(by_node=True), [0, 0, 0, 0, 1, 1], 2),
        (Grouping(by_node=True, size=2), [0, 0, 1, 1, 2, 2], 3),
        (Grouping(rows=((0, 2), (1, 3), (4, 5))), [0, 1, 0, 1, 2, 2], 3),
        (Grouping(rows=((4, 2), (1, 3))), [-1, 1, 0, 1, 0, -1], 2),
    ],
)
def test_replicas_of_six_workers_on_two_nodes(grouping: Grouping, expected: list[int], count: int) -> None:
    assert replicas(grouping, *range(6)) == (expected, count)


def test_a_row_that_lacks_a_worker_is_no_replica() -> None:
    mesh = Grouping(rows=((0, 1), (2, 3), (4, 5)))
    assert replicas(mesh, 0, 1, 2, 4, 5) == ([0, 0, -1, 1, 1], 2)
    assert mesh.incomplete({0, 1, 2, 4, 5}) == [(2, 3)]
    assert replicas(mesh, 0, 2, 4) == ([-1, -1, -1], 0)
    assert replicas(mesh) == ([], 0)
    assert replicas(mesh, *range(6)) == ([0, 0, 1, 1, 2, 2], 3)  # a replacement has the rank
    assert mesh.incomplete(range(6)) == []


def test_a_part_of_a_node_stays_the_same_when_another_lacks_a_worker() -> None:
    halves = Grouping(by_node=True, size=2)
    assert replicas(halves, 0, 2, 3, 4, 5) == ([0, 1, 1, 2, 2], 3)
    there = workers(0, 2, 3, 4, 5)
    assert [m.rank for m in replica_of(there[1], there, halves)] == [2, 3]


def test_workers_keep_what_does_not_change() -> None:
    first, _ = numbered(workers(0, 1, 2, 3), Grouping(rows=((0, 1), (2, 3))))
    again, _ = numbered(first, Grouping(rows=((0, 1), (2, 3))))
    assert all(a is b for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"size": 2}, "a size goes with by_node"),
        ({"size": -1, "by_node": True}, "a size goes with by_node"),
        ({"rows": ((0, 1),), "by_node": True}, "rows without it"),
        ({"rows": ((0, 1), (2,))}, r"replicas have \[1, 2\] workers"),
        ({"rows": ((), ())}, r"replicas have \[0\] workers"),
        ({"rows": ((0, 1), (1, 2))}, "each rank is in one of them"),
        ({"rows": ((0, 0),)}, "each rank is in one of them"),
        ({"rows": ((-1, 0),)}, "each rank is in one of them"),
        ({"rows": ((0, MAX_RANKS),)}, "each rank is in one of them"),
    ],
)
def test_a_grouping_that_cannot_be_is_refused(given: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        Grouping(**given)  # type: ignore[arg-type]


def test_equal_rows_are_one_object() -> None:
    first, second = (Grouping(rows=tuple((r, r + 9) for r in range(9))) for _ in range(2))
    assert first.rows is second.rows


def test_a_grouping_in_words() -> None:
    assert str(EACH_WORKER) == "each worker"
    assert str(Grouping(by_node=True)) == "the workers of each node"
    assert str(Grouping(by_node=True, size=2)) == "each 2 workers of a node by rank"
    assert str(Grouping(rows=((0, 2), (1, 3)))) == "the workers of ranks (0, 2), (1, 3)"
    assert str(Grouping(rows=tuple((r,) for r in range(9)))).endswith("(3,) ...")
