"""`GradientSynchronizer`: average gradients over the ranks, by hand, bucket by bucket.

Refuses: modules and autograd; `ddp.DistributedDataParallel` has those.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from axon_ps.collectives import functional
from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.collectives.work import Work
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.ddp.buckets import GradientBucket, assign, build, check_dtype
from axon_ps.parallel.rounds import Round
from axon_ps.types import ReduceOp, parse_member
from axon_ps.worker.world import World

BUCKET_NUMEL = 25 * (1 << 20) // 4
"""The default size of a bucket in elements: 25 MiB of f32."""


class GradSyncStrategy(enum.Enum):
    """The time at which gradients are averaged over the ranks."""

    SYNCHRONOUS = "synchronous"
    """All buckets are reduced after the last gradient has come."""
    OVERLAPPED = "overlapped"
    """Each bucket is reduced as soon as it is complete, while other gradients are still being computed."""
    NO_SYNC = "no_sync"
    """Nothing is reduced by itself."""


class GradientSynchronizer:
    """Averages gradients that are given one by one.

        synchronizer = GradientSynchronizer(GradSyncStrategy.OVERLAPPED)
        synchronizer.prepare(tensors)                # once: like the gradients, in the order they are expected
        for i, gradient in ...:
            synchronizer.add_gradient(i, gradient)   # OVERLAPPED: complete buckets are on their way
        averaged = synchronizer.sync_all()           # in the order of `prepare`
        synchronizer.clear()                         # for the next step

    Every rank must prepare the same shapes and dtypes. Gradients may come in any order, which may differ by rank.

    Args:
        strategy: the time at which buckets are reduced; with NO_SYNC `sync_all` gives this rank's own gradients.
        bucket_numel: elements of a bucket of f32; buckets of other dtypes have as many bytes.
        group: the ranks; None = all workers of the current world.

    Raises:
        InvalidRequest: `bucket_numel` is not above 0.
    """

    def __init__(
        self,
        strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        bucket_numel: int = BUCKET_NUMEL,
        *,
        group: ProcessGroup | World | None = None,
    ) -> None:
        if bucket_numel < 1:
            raise InvalidRequest(f"bucket_numel is {bucket_numel}; a bucket needs room for at least one element")
        self.strategy = parse_member(strategy, GradSyncStrategy, "strategy")
        self.bucket_numel = bucket_numel
        self._group = group
        self._buckets: list[GradientBucket] = []
        self._views: dict[int, Tensor] = {}
        self._round = self._new_round()

    @property
    def buckets(self) -> tuple[GradientBucket, ...]:
        """The buckets of the prepared tensors, in the order in which they are reduced."""
        return tuple(self._buckets)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Make buckets for gradients of these shapes, dtypes and devices. The first call for host memory is collective.

        Args:
            tensors: parameters, or anything like their gradients, in the order in which gradients are expected.

        Raises:
            InvalidRequest: they are not tensors, or gradients of some dtype cannot be summed.
        """
        if not isinstance(tensors, Sequence) or not all(isinstance(t, Tensor) for t in tensors):
            raise InvalidRequest(
                f"prepare() was given {reprlib.repr(tensors)}; it needs a list of the parameters (or of tensors like "
                "their gradients), by whose shapes and dtypes it makes its buckets"
            )
        for i, tensor in enumerate(tensors):
            check_dtype(tensor.dtype, f"tensor {i}")
        size = self.bucket_numel * 4
        plan = assign(tensors, range(len(tensors)), first_bytes=size, bucket_bytes=size)
        mapped_by = None if self.strategy is GradSyncStrategy.NO_SYNC else functional.current_group(self._group)
        self._buckets, self._views = build(tensors, plan, mapped_by)
        self.clear()

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Copy the gradient of tensor `index` into its bucket.

        With NO_SYNC a gradient that comes again before `clear` is added to the earlier one.

        Raises:
            Misuse: it came before, or everything was averaged; call `clear` before the next step.
            InvalidRequest: there is no such tensor, or the gradient has another shape or dtype than it.
        """
        if index not in self._views:
            raise InvalidRequest(f"there is no gradient {index}; prepare() was given {len(self._views)} tensors")
        view = self._views[index]
        if gradient.shape != view.shape or gradient.dtype is not view.dtype:
            raise InvalidRequest(
                f"gradient {index} is {gradient.dtype}{list(gradient.shape)}; needed is {view.dtype}{list(view.shape)}"
            )
        if self.strategy is GradSyncStrategy.NO_SYNC:
            view.add_(gradient.detach())
            return
        if index not in self._round.missing:
            raise Misuse(f"gradient {index} has come already; call clear() before the next step")
        view.copy_(gradient.detach())
        self._round.ready(index)

    def sync_all(self, group: ProcessGroup | World | None = None) -> list[Tensor]:
        """Wait until everything is averaged.

        Args:
            group: the ranks, as in the Rust crates; None = the constructor's group. No other group is accepted.

        Returns:
            The gradients, in the order of `prepare`. They are views of the buckets, valid until `clear`.

        Raises:
            Misuse: gradients are missing (not with NO_SYNC); the message names them.
            InvalidRequest: it is another group.
            AxonError: a collective failed.

        After an error: after `Misuse` and `InvalidRequest` nothing has changed. After other errors the gradients are
        undefined.
        """
        if group is not None:
            given, ours = functional.current_group(group), functional.current_group(self._group)
            if given.name != ours.name:
                raise InvalidRequest(
                    f"sync_all() was given group {given.name!r}, and the gradients travel in {ours.name!r} while they "
                    "come; give GradientSynchronizer(..., group=) the group"
                )
        if self.strategy is not GradSyncStrategy.NO_SYNC:
            if missing := sorted(self._round.missing):
                raise Misuse(f"the gradients {missing} have not come; give them with add_gradient() before sync_all()")
            self._round.start_complete()
            list(self._round.results())
        return [self._views[i] for i in range(len(self._views))]

    def clear(self) -> None:
        """Wait for the reductions under way, and set the gradients to zero. The buckets stay."""
        list(self._round.results())
        for bucket in self._buckets:
            bucket.flat.zero_()
        self._round = self._new_round()

    def _new_round(self) -> Round:
        buckets, group = self._buckets, self._group

        def start(position: int) -> Work[Any]:
            flat = buckets[position].flat
            work: Work[Any] = functional.current_group(group).all_reduce(flat, ReduceOp.AVERAGE, async_op=True)
            return work

        members = [bucket.members for bucket in buckets]
        return Round(members, start, overlapped=self.strategy is GradSyncStrategy.OVERLAPPED)


__all__ = ["BUCKET_NUMEL", "GradSyncStrategy", "GradientBucket", "GradientSynchronizer"]
