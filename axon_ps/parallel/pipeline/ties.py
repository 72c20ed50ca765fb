"""Parameters that several stages share, such as a first stage's embedding and a last stage's output layer.

Every rank with such a stage has a copy. All copies begin equal, and after each step's backward all have the sum of all
copies' gradients. So they stay equal if the optimizers do the same on every rank.

Invariant: a gradient from before the step (accumulation) is added once, not once per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axon_ps.collectives.process_group import ProcessGroup

Tie = tuple[tuple[int, str], ...]
"""The copies of one parameter, each as its stage and its name in the stage's module."""


@dataclass(frozen=True)
class _TiedParameter:
    """One parameter's copies on this rank, and the group of ranks that have copies; None = only this rank."""

    copies: list[nn.Parameter]
    group: ProcessGroup | None


class TiedParameters:
    """This rank's copies of shared parameters. Making it is collective when there is a group.

    Args:
        ties: the copies of each shared parameter; the same on every rank.
        owner: the rank of each stage.
        modules: this rank's stages.
        group: the pipeline's own; None = all stages are here.

    Raises:
        AttributeError: a stage has no parameter of that name.
        Disagreement: copies on different ranks have different shapes or dtypes.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        owner: Sequence[int],
        modules: Mapping[int, nn.Module],
        group: ProcessGroup | None,
    ) -> None:
        self._tied: list[_TiedParameter] = []
        self._before: list[list[Tensor | None]] = []
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        for tie in ties:
            among = self._among(sorted({owner[stage] for stage, _ in tie}), group)
            found = [modules[stage].get_parameter(name) for stage, name in tie if stage in modules]
            copies = list({id(p): p for p in found}.values())
            if copies and (among is not None or len(copies) > 1):
                self._tied.append(_TiedParameter(copies, among))
        with torch.no_grad():
            for tied in self._tied:
                if tied.group is not None:
                    tied.group.broadcast(tied.copies[0].data)
                for copy in tied.copies[1:]:
                    copy.copy_(tied.copies[0])

    @property
    def counted_elsewhere(self) -> tuple[nn.Parameter, ...]:
        """Copies on this rank, without the first copy of a parameter if this is the first rank that has one."""
        return tuple(copy for tied in self._tied for copy in tied.copies[tied.group is None or tied.group.rank == 0 :])

    def begin(self) -> None:
        """Put the gradients aside, before a step."""
        self._before = [[p.grad for p in tied.copies] for tied in self._tied]
        for tied in self._tied:
            for copy in tied.copies:
                copy.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Give every copy the sum of all copies' gradients, after a step's backward, on every rank."""
        for tied, before in zip(self._tied, self._before, strict=True):
            total = torch.zeros_like(tied.copies[0])
            for copy in tied.copies:
                if copy.grad is not None:
                    total += copy.grad.to(total.device)
            if tied.group is not None:
                tied.group.all_reduce(total)
            for copy, old in zip(tied.copies, before, strict=True):
                if copy.requires_grad:
                    grad = total.to(copy.device)
                    copy.grad = grad.clone() if old is None else old.add_(grad)
        self._before = []

    def _among(self, ranks: Sequence[int], group: ProcessGroup | None) -> ProcessGroup | None:
        """Return the group of some ranks, made once, or None if it is one rank. Collective."""
        if group is None or len(ranks) == 1:
            return None
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = group.new_group(ranks)
        return self._groups[key]


def find_ties(modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find parameters that are the same object in several stages.

    Args:
        modules: of all stages, in order.
    """
    uses: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((stage, name))
    return tuple(tuple(found) for found in uses.values() if len({stage for stage, _ in found}) > 1)
