"""`Ticket`: the name of a step attempt in every push and in the vote."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

NO_GENERATION = -1
"""The generation of a void ticket."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The identification of one step attempt of this worker, which is sent with all its pushes."""

    generation: int
    step: int
    replica: int
    num_replicas: int
    why_void: str = ""

    @property
    def is_void(self) -> bool:
        """True if its step cannot commit."""
        return self.generation == NO_GENERATION

    def void(self, why: str) -> Self:
        """Return a void copy: nothing is pushed with it, and its vote is an abort."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why)
