"""`MeshLines`: the lines of a mesh, which the workers of a model learn from each other before it is registered.

Each worker stores its rank and its line in the job, by its rank in torch's process group. The first worker of a line
stores the description of the line's units; the others compare theirs with it. A worker that comes later finds all of
them there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from axon_ps.errors import InvalidRequest, LayoutMismatch, Timeout
from axon_ps.rpc.deadlines import Deadline
from axon_ps.texts import value_of_json
from axon_ps.types import Grouping
from axon_ps.worker.world import World

_KEY = "axon_ps/mesh/{}/{}"
"""Key of what the workers of a model tell each other, by its name."""

_SOON_S = 0.05


@dataclass(frozen=True, kw_only=True)
class MeshLines:
    """The lines of a mesh.

    Attributes:
        world: the worker.
        name: the model's name in the job.
        own: number of this worker's line.
        lines: ranks of torch's in each line, by their index on the axis dp.
        replica: this worker's index on that axis.
        rows: the job's ranks of each replica's workers, by line.
    """

    world: World
    name: str
    own: int
    lines: tuple[tuple[int, ...], ...]
    replica: int
    rows: tuple[tuple[int, ...], ...]
    _given: list[str] = field(default_factory=list, init=False, compare=False)

    @property
    def grouping(self) -> Grouping:
        """The workers that make a replica together."""
        return Grouping(rows=self.rows)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return a JSON value of each line. All workers of a line give the same.

        Raises:
            LayoutMismatch: another worker of this line gave another one.
            Timeout: the workers of a line gave none.
        """
        key, text = _KEY.format(self.name, what), json.dumps(value).encode()
        self._given.append(what)
        if not self.world.kv_compare_and_set(f"{key}/{self.own}", b"", text):
            first = self.world.kv_get(f"{key}/{self.own}") or b""
            if first != text:
                raise LayoutMismatch(
                    f"the {what} of model {self.name!r} differ between workers of line {self.own}, those with the same "
                    f"coordinates on all axes of the mesh but dp: {_difference(first.decode(), text.decode())}; every "
                    "worker of a line must build the same"
                )
        return [
            value_of_json(self.world.kv_wait(f"{key}/{line}"), f"the {what} of line {line}")
            for line in range(len(self.lines))
        ]

    def forget(self) -> None:
        """Remove what this line gave to exchanges, since the model is released."""
        while self._given:
            self.world.kv_delete(f"{_KEY.format(self.name, self._given.pop())}/{self.own}")

    @property
    def rank(self) -> int:
        """This worker's rank in torch's process group."""
        return self.lines[self.own][self.replica]


def meet(world: World, name: str, line: Sequence[int], timeout_s: float) -> MeshLines:
    """Learn the lines of all workers.

    Args:
        world: this worker.
        name: the model's name in the job.
        line: the ranks of torch's in this worker's line, in the order of the axis dp.
        timeout_s: most seconds to wait for the others.

    Raises:
        InvalidRequest: torch's process group is not all workers of the world, or the lines are not those of a mesh.
        Timeout: a worker does not wrap a model by this name.
    """
    size = torch.distributed.get_world_size()
    if size != world.world_size:
        raise InvalidRequest(
            f"torch's process group has {size} ranks and the world {world.world_size} workers; every rank that is in "
            "the mesh joins the job, and no other"
        )
    rank, deadline = torch.distributed.get_rank(), Deadline(timeout_s)
    key = _KEY.format(name, "ranks")
    world.kv_put(f"{key}/{rank}", json.dumps({"rank": world.rank, "line": list(line)}).encode())
    while True:
        found = [_worker(world.kv_wait(f"{key}/{other}", deadline.remaining())) for other in range(size)]
        ranks = [worker["rank"] for worker in found]
        if sorted(ranks) == sorted(member.rank for member in world.membership.workers):
            break
        if deadline.expired:  # some are of an earlier run of the program
            raise Timeout(f"workers {sorted(ranks)} gave their places in the mesh of model {name!r}, twice or not all")
        time.sleep(_SOON_S)
    lines = tuple(sorted({tuple(worker["line"]) for worker in found}))
    _check(lines, size)
    own = next(number for number, other in enumerate(lines) if rank in other)
    rows = tuple(tuple(ranks[other[i]] for other in lines) for i in range(len(line)))
    return MeshLines(world=world, name=name, own=own, lines=lines, replica=lines[own].index(rank), rows=rows)


def _worker(text: bytes) -> Mapping[str, Any]:
    worker: Mapping[str, Any] = value_of_json(text, "the place of a worker in the mesh")
    return worker


def _check(lines: Sequence[Sequence[int]], size: int) -> None:
    ranks = sorted(rank for line in lines for rank in line)
    if ranks != list(range(size)) or len({len(line) for line in lines}) > 1:
        raise InvalidRequest(
            f"the axes given as mesh have the ranks {[list(line) for line in lines]}, and each of {size} ranks must be "
            "in one of them; give the axis of one mesh, as mesh['dp'], on every worker"
        )


def _difference(theirs: str, ours: str) -> str:
    """Return a few characters of two texts from where they differ."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    begin = max(0, at - 60)
    return f"{theirs[begin : at + 60]!r} and {ours[begin : at + 60]!r}"


__all__ = ["MeshLines", "meet"]
