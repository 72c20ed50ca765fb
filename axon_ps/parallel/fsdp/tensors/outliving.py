"""Memory of a unit that a program still reads after the unit was freed.

Note: [Views that outlive their unit]
    A forward may return a view of a parameter (`return self.pe[:n]`, `Normal(mu, self.std)`, `weight.detach()`), and
    the program reads it later. To free memory under a view would end the process. So memory that has other holders
    than the unit is left to them, and the unit gets other memory with its next values. The view has its values for as
    long as they are current, as in torch. Once the unit has others, the view is filled with NaN, since torch would show
    the new ones there.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from axon_ps.parallel.fsdp.steps import Position


def holders(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and other objects that have this memory."""
    return torch._C._storage_Use_Count(storage._cdata)


class Outliving:
    """The memory of one unit that was left to others.

    Args:
        dtype: the dtype of its values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._left: list[tuple[Position | None, StorageWeakRef]] = []

    def leave(self, storage: torch.UntypedStorage, at: Position | None) -> None:
        """Leave this memory, with values of this step, to its other holders."""
        self._left.append((at, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def expire(self, at: Position | None) -> None:
        """Fill memory that was left with NaN, if its values are of another step than the unit's now."""
        for storage in [self._alive(ref) for left, ref in self._left if left != at]:
            if storage is not None:
                torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage).fill_(float("nan"))
        self._left = [(left, ref) for left, ref in self._left if left == at and self._alive(ref) is not None]

    @staticmethod
    def _alive(ref: StorageWeakRef) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
