"""The step attempts under way on a shard server: one of all replicas, or one of each asynchronous replica. Pure.

Note: [Asynchronous replicas]
    Where replicas step asynchronously (`sharding.policy`), each has an attempt and an accumulator of its own, so that
    all of them may push at the same time. An attempt is named by the replica's clock: how many of its steps were
    decided in this generation. The coordinator decides them one by one; every decision has a step number and, if it
    commits, a version, so the order of updates is one order, the same on all servers. A server that applies one step
    while the next ones are decided takes them in that order (`shard.server.model_shell`, Note: [In order]).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from axon_ps.types import Decision


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        step: what chunks must name: the step, or the replica's clock where replicas step asynchronously.
        replicas: how many are summed.
        missing: chunks that lack a replica's gradient.
        last_committable: the last attempt here that ended with all gradients summed.
    """

    step: int = 0
    replicas: int = 0
    missing: int = 0
    last_committable: int = -1

    def end(self, step: int, missing: int, *, summed: bool) -> None:
        """The attempt is decided: `step` names the next one; `summed`: whether every gradient was there."""
        if summed:
            self.last_committable = self.step
        self.step = step
        self.missing = missing


class Attempts:
    """All of them, by the index of their accumulator: 0 where replicas step together, else the replica's number.

    Attributes:
        asynchronous: whether each replica's gradient is a step of its own.
    """

    def __init__(self) -> None:
        self.asynchronous = False
        self._all = [Attempt()]

    def begin(self, *, asynchronous: bool, step: int, num_replicas: int) -> None:
        """Begin the attempts of a generation: one, or one per replica.

        Args:
            asynchronous: whether each replica's gradient is a step of its own.
            step: the step that all replicas make together.
            num_replicas: of the generation.
        """
        self.asynchronous = asynchronous
        if asynchronous:
            self._all = [Attempt(replicas=1) for _ in range(max(1, num_replicas))]
        else:
            last = self._all[0].last_committable
            self._all = [Attempt(step=step, replicas=num_replicas, last_committable=last)]

    def place(self, replica: int) -> tuple[int, int]:
        """(accumulator, turn): the index of what a replica's gradients are added to, and after how many others."""
        return (replica, 0) if self.asynchronous else (0, replica)

    def decided(self, decision: Decision) -> tuple[int, int, int]:
        """(accumulator, step, next step): the attempt that a decision is on, its name, and the name of the next one."""
        if decision.turn is None:
            return 0, decision.step, decision.step + 1
        return decision.turn.replica, decision.turn.clock, decision.turn.clock + 1

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._all)

    def __getitem__(self, accumulator: int) -> Attempt:
        return self._all[accumulator]
