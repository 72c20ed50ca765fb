"""`NodeTicket`: a step attempt of the workers of a node."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from axon_ps.worker.steps.ticket import NO_GENERATION, Ticket


@dataclass(frozen=True, kw_only=True)
class NodeTicket(Ticket):
    """A ticket that the workers of a node share.

    Attributes:
        num_replicas: number of gradients that are averaged: those of all workers of all nodes.
        shared: the ticket of the node's pushes.
    """

    shared: Ticket

    def next_addend(self) -> Self:
        """See `Ticket.next_addend`."""
        return dataclasses.replace(self, addend=self.addend + 1, shared=self.shared.next_addend())

    def void(self, why: str) -> Self:
        """See `Ticket.void`."""
        return dataclasses.replace(self, generation=NO_GENERATION, why_void=why, shared=self.shared.void(why))
