"""`Ticket`: the name of a step attempt in every push and in the vote."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

NO_GENERATION = -1
"""The generation of a void ticket."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The identification of one step attempt of this worker, which is sent with all its pushes.

    Attributes:
        generation: the generation.
        step: the attempt; for asynchronous replicas, the replica's clock.
        replica: this worker's.
        num_replicas: the number of replicas whose gradients are averaged.
        addend: the addend that is pushed with it; see `shard.core.gradients`, Note: [Addends].
        why_void: the reason why it is void.
    """

    generation: int
    step: int
    replica: int
    num_replicas: int
    addend: int = 0
    why_void: str = ""

    @property
    def is_void(self) -> bool:
        """True if its step cannot commit."""
        return self.generation == NO_GENERATION

    def next_addend(self) -> Self:
        """Return the ticket of the same attempt's next addend."""
        return dataclasses.replace(self, addend=self.addend + 1)

    def void(self, why: str) -> Self:
        """Return a void copy: nothing is pushed with it, and its vote is an abort."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why)
