"""`OptimizerGroups`: the parameter group of every parameter of all lines of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.mesh.lines import MeshLines
from axon_ps.sharding.layout import Layout


class OptimizerGroups:
    """The groups of the parameters of a model, which each worker knows of its own line.

    Every worker gives its groups in the same order of calls.

    Args:
        lines: the lines.
        layout: that of all lines.
    """

    def __init__(self, lines: MeshLines, layout: Layout) -> None:
        self._lines = lines
        self._layout = layout
        self._given = 0
        self._last: tuple[int, Mapping[int, Sequence[int]]] | None = None
        self._of_all: tuple[int, ...] = ()

    def of_all(self, own: Mapping[int, Sequence[int]], count: int) -> tuple[int, ...]:
        """Return the group of each parameter of the layout.

        Args:
            own: by unit of this worker's line, the groups of its parameters.
            count: number of groups.

        Raises:
            InvalidRequest: another line has another number of groups, or other groups of parameters that both have.
            LayoutMismatch, Timeout: as of `MeshLines.exchange`.
        """
        if self._last == (count, own):
            return self._of_all
        value = {"count": count, "groups": {str(unit): list(groups) for unit, groups in own.items()}}
        given = self._lines.exchange(f"groups of the optimizer, {self._given},", value)
        self._given += 1
        found: dict[int, list[int]] = {}
        for line, answer in enumerate(given):
            if answer["count"] != count:
                raise InvalidRequest(
                    f"the optimizer has {count} groups in line {self._lines.own} of the mesh and {answer['count']} in "
                    f"line {line}; give the optimizer the same groups on every worker, empty where there is nothing"
                )
            for unit, groups in answer["groups"].items():
                if found.setdefault(int(unit), groups) != groups:
                    raise InvalidRequest(
                        f"parameters of unit {self._layout.name_of(int(unit))!r} are in groups {groups} in line {line} "
                        f"and {found[int(unit)]} in another, and both have them; give the same groups"
                    )
        self._last = count, {unit: list(groups) for unit, groups in own.items()}
        self._of_all = tuple(group for unit in range(len(self._layout.units)) for group in found[unit])
        return self._of_all
