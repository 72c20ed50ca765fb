"""Memory of a unit that a program still reads after the unit was given back.

Note: [Views that outlive their unit]
    A forward may return a view of a parameter (`return self.pe[:n]`, `Normal(mu, self.std)`, `weight.detach()`), and
    the program reads it later. To free memory under a view would end the process. So memory that anybody but the unit
    has is left to whoever has it, and the unit gets other memory with its next values. The view has the values that it
    was made of for as long as those are current, which is what torch shows; once the unit has others, it is filled with
    NaN, since torch would show the new ones there.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from axon_ps.parallel.fsdp.steps import Position


def holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors and other objects that have this memory."""
    return torch._C._storage_Use_Count(storage._cdata)


class Outliving:
    """The memory of one unit that was left to others.

    Args:
        dtype: of its values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._left: list[tuple[Position | None, StorageWeakRef]] = []

    def leave(self, storage: torch.UntypedStorage, at: Position | None) -> None:
        """Others have this memory, with values of this step."""
        self._left.append((at, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def expire(self, at: Position | None) -> None:
        """The unit has values of another step now: fill what was left with NaN."""
        for storage in [self._alive(ref) for left, ref in self._left if left != at]:
            if storage is not None:
                torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage).fill_(float("nan"))
        self._left = [(left, ref) for left, ref in self._left if left == at and self._alive(ref) is not None]

    @staticmethod
    def _alive(ref: StorageWeakRef) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
