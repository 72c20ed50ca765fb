"""`Timeline`: the computations of a step with their times, recorded, or simulated from a table of actions.

Owns: the bubble fraction, pictures in text, the simulation. Refuses: to measure (the executor does).

The simulation is exact for ranks that do their actions in order, each as soon as its inputs are there. From times that
were measured on a machine with fewer cores (or GPUs), it predicts those of a machine with one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from axon_ps.errors import InternalError
from axon_ps.parallel.pipeline.schedule import Action, ActionKind, gives, needs

_FILL = {
    ActionKind.FORWARD: "=",
    ActionKind.BACKWARD: "#",
    ActionKind.BACKWARD_INPUT: "#",
    ActionKind.BACKWARD_WEIGHT: "+",
}
_IDLE = "."


class ActionSpan(NamedTuple):
    """An action's time.

    Attributes:
        rank: the rank that did it.
        action: the action.
        begin_s: time at which it began, on rank 0's clock. A simulation begins at 0.
        end_s: time at which it had ended.
        cpu_s: CPU seconds of the thread that did it.
    """

    rank: int
    action: Action
    begin_s: float
    end_s: float
    cpu_s: float

    def as_json(self) -> list[Any]:
        """Return the fields as a JSON list, to send to other ranks."""
        kind, stage, microbatch = self.action
        return [self.rank, kind.value, stage, microbatch, self.begin_s, self.end_s, self.cpu_s]

    @classmethod
    def from_json(cls, fields: Sequence[Any], offset_s: float = 0.0) -> ActionSpan:
        """Make a span from `as_json` of another rank, whose clock differs by `offset_s`."""
        rank, kind, stage, microbatch, begin_s, end_s, cpu_s = fields
        return cls(rank, Action(ActionKind(kind), stage, microbatch), begin_s - offset_s, end_s - offset_s, cpu_s)


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        spans: in no particular order between ranks; in order for each of them.
        ranks: number of ranks.
    """

    spans: tuple[ActionSpan, ...]
    ranks: int

    @property
    def begin_s(self) -> float:
        """Time at which the first action began."""
        return min((s.begin_s for s in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the beginning of the first action to the end of the last."""
        return max((s.end_s for s in self.spans), default=0.0) - self.begin_s

    def of(self, rank: int) -> list[ActionSpan]:
        """Return a rank's spans."""
        return [s for s in self.spans if s.rank == rank]

    def busy_s(self, rank: int) -> float:
        """Return the time for which a rank computed."""
        return sum(s.end_s - s.begin_s for s in self.of(rank))

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the ranks' time, from first action to last, in which they do not compute."""
        total = self.ranks * self.makespan_s
        return 1.0 - sum(s.end_s - s.begin_s for s in self.spans) / total if total else 0.0

    def replayed(self, transfer_s: float = 0.0) -> Timeline:
        """Return the same actions in the same order, as if every rank had a core: each takes its CPU time."""
        cpu_s = {s.action: s.cpu_s for s in self.spans}
        return simulate([[s.action for s in self.of(r)] for r in range(self.ranks)], cpu_s.__getitem__, transfer_s)

    def gantt(self, width: int = 96) -> str:
        """Draw a line per rank: `F3==` forward of microbatch 3, `B3##` backward (`I` and `W` when split), `.` idle."""
        scale = width / self.makespan_s if self.spans else 0.0
        lines = []
        for rank in range(self.ranks):
            columns = [_IDLE] * width
            for span in self.of(rank):
                begin = min(round((span.begin_s - self.begin_s) * scale), width - 1)
                end = max(round((span.end_s - self.begin_s) * scale), begin + 1)
                label = str(span.action)[: end - begin]
                columns[begin:end] = label.ljust(end - begin, _FILL[span.action.kind])
            lines.append(f"rank {rank} |{''.join(columns[:width])}|")
        lines.append(f"bubble {self.bubble_fraction:.1%} of {self.makespan_s * 1e3:.2f} ms x {self.ranks} ranks")
        return "\n".join(lines)

    def table(self) -> str:
        """Return a line for each action, by begin: rank, stage, action, begin and end in milliseconds."""
        rows = [f"{'rank':>4} {'stage':>5} {'action':>6} {'begin/ms':>10} {'end/ms':>10}"]
        for s in sorted(self.spans, key=lambda s: (s.begin_s, s.rank)):
            begin, end = ((t - self.begin_s) * 1e3 for t in (s.begin_s, s.end_s))
            rows.append(f"{s.rank:>4} {s.action.stage:>5} {s.action!s:>6} {begin:>10.3f} {end:>10.3f}")
        return "\n".join(rows)


def simulate(
    tables: Sequence[Sequence[Action]], cost_s: Callable[[Action], float], transfer_s: float = 0.0
) -> Timeline:
    """Run the tables of all ranks.

    Args:
        tables: by rank, its actions in order.
        cost_s: returns the seconds that an action takes.
        transfer_s: seconds that a message between ranks takes. The sender does not wait for it.

    Raises:
        InternalError: the tables deadlock. The message lists the actions that cannot begin.
    """
    stages = 1 + max((a.stage for table in tables for a in table), default=-1)
    done: dict[tuple[ActionKind, int, int], tuple[int, float]] = {}  # kind, stage, microbatch -> rank, end
    position, free_s = [0] * len(tables), [0.0] * len(tables)
    spans: list[ActionSpan] = []
    moved = True
    while moved:
        moved = False
        for rank, table in enumerate(tables):
            while position[rank] < len(table):
                action = table[position[rank]]
                inputs = [done.get((*need, action.microbatch)) for need in needs(action, stages)]
                if None in inputs:
                    break
                ready = [end + transfer_s * (by != rank) for by, end in filter(None, inputs)]
                begin_s = max([free_s[rank], *ready])
                free_s[rank] = begin_s + cost_s(action)
                done[(*gives(action), action.microbatch)] = rank, free_s[rank]
                spans.append(ActionSpan(rank, action, begin_s, free_s[rank], free_s[rank] - begin_s))
                position[rank] += 1
                moved = True
    stuck = {r: str(t[n]) for r, (t, n) in enumerate(zip(tables, position, strict=True)) if n < len(t)}
    if stuck:
        raise InternalError(f"the schedule deadlocks: by rank, what waits for ever: {stuck}")
    return Timeline(tuple(spans), len(tables))


def ideal_bubble(ranks: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Return (p - 1) / (k·m + p - 1), for GPipe, 1F1B (k = 1) and interleaved 1F1B, equal stages and free messages."""
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
