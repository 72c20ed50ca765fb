"""The step attempts under way on a shard server: one of all replicas together, or one of each replica alone. Pure.

Note: [Alone]
    Where replicas step alone (`sharding.policy`), each has an attempt and a sum of its own, so that all of them may
    push at the same time. An attempt is named by the replica's clock: how many of its steps were decided in this
    generation. The coordinator decides them one by one; every decision has a step number and, if it commits, a version,
    so the order of updates is one order, the same on all servers. A server that applies one step while the next ones
    are decided takes them in that order (`shard.server.shell`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from axon_ps.types import Decision


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        step: what chunks must name: the step, or the replica's clock where replicas step alone.
        replicas: how many are summed.
        missing: chunks that lack a replica's gradient.
        last_committable: the last attempt here that ended with all gradients summed.
    """

    step: int = 0
    replicas: int = 0
    missing: int = 0
    last_committable: int = -1

    def end(self, step: int, missing: int, *, summed: bool) -> None:
        """The attempt is decided: `step` is the next one's name; `summed` says whether every gradient was there."""
        if summed:
            self.last_committable = self.step
        self.step = step
        self.missing = missing


class Attempts:
    """All of them, each in its *lane*: lane 0 where replicas step together, that of the replica where each is alone.

    Attributes:
        alone: whether each replica's gradient is a step of its own.
    """

    def __init__(self) -> None:
        self.alone = False
        self._all = [Attempt()]

    def begin(self, *, alone: bool, step: int, num_replicas: int) -> None:
        """As many attempts as there are in a generation begin.

        Args:
            alone: whether each replica's gradient is a step of its own.
            step: the step that all replicas make together.
            num_replicas: of the generation.
        """
        self.alone = alone
        if alone:
            self._all = [Attempt(replicas=1) for _ in range(max(1, num_replicas))]
        else:
            last = self._all[0].last_committable
            self._all = [Attempt(step=step, replicas=num_replicas, last_committable=last)]

    def place(self, replica: int) -> tuple[int, int]:
        """(lane, turn): where a replica's gradients are summed, and after how many others."""
        return (replica, 0) if self.alone else (0, replica)

    def decided(self, decision: Decision) -> tuple[int, int, int]:
        """(lane, step, next step): which attempt a decision is on, its name, and that of the one that follows."""
        if decision.turn is None:
            return 0, decision.step, decision.step + 1
        return decision.turn.replica, decision.turn.clock, decision.turn.clock + 1

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._all)

    def __getitem__(self, lane: int) -> Attempt:
        return self._all[lane]
