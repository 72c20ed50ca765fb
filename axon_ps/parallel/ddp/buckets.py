"""Buckets: many gradients in one flat array, so that they travel in one collective.

Owns: the assignment of gradients to buckets, and the memory of buckets. Refuses: the time of a
reduction (`parallel.rounds`), its method (`comm_hooks`) and the source of gradients (`reducer`, `synchronizer`).

    shape legend: T[numel] = a bucket's elements, all of one dtype on one device
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from axon_ps.collectives import cuda, functional
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.precision import torch_dtype

_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
}


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Check that gradients of this dtype can be summed.

    Raises:
        InvalidRequest: they cannot; the message begins with `what`.
    """
    if dtype not in _NUMPY:
        known = ", ".join(str(d) for d in _NUMPY)
        raise InvalidRequest(f"{what} has dtype {dtype}, which is not reduced; use one of {known}")


def flat_memory(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None) -> Tensor:
    """Return T[numel] of zeros in device memory, or in host memory that the ranks of a host map if their group can.

    Args:
        numel: number of elements.
        dtype: a floating-point type.
        device: the device of the memory.
        group: the group that reduces it; None = memory of this process alone.
    """
    if group is None or cuda.memory().is_device(device):
        return torch.zeros(numel, dtype=dtype, device=device)
    array = functional.empty_shared(numel, _NUMPY[dtype], group=group)
    flat = torch.from_numpy(array).zero_()
    return flat.view(torch.bfloat16) if dtype is torch.bfloat16 else flat


class GradientBucket:
    """One flat array that gradients are put into and taken from.

    Args:
        capacity: most elements that it can hold.
        dtype: dtype of its gradients, or its name.
        device: device of its gradients.
        group: the group that reduces it, so that the other ranks of the host can map its memory.
        index: its position among the buckets that are reduced together.

    Attributes:
        members: number of each gradient in it, in the order they were put in.
        views: views of their memory, in the same order, in their shapes.

    Raises:
        InvalidRequest: `capacity` is negative, or gradients of this dtype cannot be summed.
    """

    def __init__(
        self,
        capacity: int,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        index: int = 0,
    ) -> None:
        if capacity < 0:
            raise InvalidRequest(f"capacity is {capacity} elements; it must not be negative")
        dtype = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
        check_dtype(dtype, "a bucket")
        self.capacity = capacity
        self.index = index
        self.members: list[int] = []
        self.views: list[Tensor] = []
        self._numel = 0
        self._memory = flat_memory(capacity, dtype, torch.device(device), group)

    @property
    def numel(self) -> int:
        """Elements that are in use."""
        return self._numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every gradient in it."""
        return self._memory.dtype

    @property
    def is_full(self) -> bool:
        """True if not one more element fits."""
        return self._numel >= self.capacity

    @property
    def flat(self) -> Tensor:
        """T[numel]: all its elements. Values written here appear in `extract` and `views`."""
        return self._memory[: self._numel]

    def reserve(self, shape: Sequence[int], member: int) -> Tensor | None:
        """Reserve memory for a gradient, and return its view, or None when it does not fit.

        Before the first `clear` the view is of zeros.
        """
        numel = math.prod(shape)
        if self._numel + numel > self.capacity:
            return None
        view = self._memory[self._numel : self._numel + numel].view(tuple(shape))
        self._numel += numel
        self.members.append(member)
        self.views.append(view)
        return view

    def add(self, gradient: Tensor) -> bool:
        """Copy a gradient into it.

        Returns:
            False, with nothing changed, when it does not fit.

        Raises:
            InvalidRequest: it has another dtype than the bucket.
        """
        if gradient.dtype is not self.dtype:
            raise InvalidRequest(
                f"a gradient of {gradient.dtype} was given to a bucket of {self.dtype}; keep them apart"
            )
        view = self.reserve(gradient.shape, len(self.members))
        if view is None:
            return False
        view.copy_(gradient.detach())
        return True

    def extract(self) -> list[Tensor]:
        """Return copies of the gradients in it, in the order they were added and in their shapes."""
        return [view.clone() for view in self.views]

    def clear(self) -> None:
        """Take everything out, but keep the memory. Views that were taken from it will show the next gradients."""
        self._numel = 0
        self.members, self.views = [], []


def assign(
    tensors: Sequence[Tensor], order: Iterable[int], *, first_bytes: int, bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Assign tensors to buckets: neighbours in `order` of one dtype and device, up to so many bytes.

    The first bucket of each kind is small so that communication begins early (Li et al., "PyTorch Distributed",
    https://arxiv.org/abs/2006.15704, section 3.2.2). Each bucket may be twice as large as the one before it, up to
    `bucket_bytes`, so that it is complete before the network is idle. A tensor larger than a bucket has a bucket of its
    own.

    Args:
        tensors: the tensors whose gradients are assigned.
        order: the order in which gradients are expected; positions in `tensors`.
        first_bytes: size of the first bucket of each kind.
        bucket_bytes: size of the largest.

    Returns:
        The members of each bucket, in the order in which the buckets are expected to be complete.
    """
    done: list[tuple[int, list[int]]] = []  # with the moment at which the last member is expected
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    when: dict[int, int] = {}
    for moment, member in enumerate(order):
        tensor = tensors[member]
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        when[member] = moment
        bucket = kinds.setdefault(kind, [])
        if bucket and sizes[kind] + size > limits.get(kind, first_bytes):
            done.append((when[bucket[-1]], bucket))
            bucket, limits[kind] = [], min(2 * max(limits.get(kind, first_bytes), sizes[kind]), bucket_bytes)
            kinds[kind] = bucket
        sizes[kind] = (sizes[kind] if bucket else 0) + size
        bucket.append(member)
    done += [(when[bucket[-1]], bucket) for bucket in kinds.values() if bucket]
    return [tuple(members) for _, members in sorted(done)]


def build(
    tensors: Sequence[Tensor], plan: Sequence[Sequence[int]], group: ProcessGroup | None
) -> tuple[list[GradientBucket], dict[int, Tensor]]:
    """Make the buckets of a plan from `assign`, and return them, and the gradients' views by member."""
    buckets: list[GradientBucket] = []
    views: dict[int, Tensor] = {}
    for index, members in enumerate(plan):
        first = tensors[members[0]]
        capacity = sum(tensors[m].numel() for m in members)
        bucket = GradientBucket(capacity, dtype=first.dtype, device=first.device, group=group, index=index)
        for member in members:
            bucket.reserve(tensors[member].shape, member)
        views |= zip(members, bucket.views, strict=True)
        buckets.append(bucket)
    return buckets, views
