"""`Round`: one reduction of gradients over the ranks, bucket by bucket, while they are still being computed.

Owns: the time at which each bucket is reduced, and the list of missing gradients. Refuses: to know what a bucket is,
where its gradients come from and how they are averaged; DDP, NO_SHARD and `GradientSynchronizer` do.

Note: [One order of reductions]
    Every rank reduces the buckets in one order, in whatever order their gradients become complete: a bucket is reduced
    after those before it. At the end of backward, missing gradients count as zeros. So the ranks make the same
    reductions even if one of them lacks a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from axon_ps.collectives.work import Work


class Round:
    """One reduction of all buckets; see the module.

    Args:
        members: the numbers of each bucket's gradients, in the order in which the buckets are reduced.
        start: starts the reduction of a bucket, by its position.
        overlapped: start buckets as soon as they are complete; else only when `start_complete` is called.

    Attributes:
        missing: the gradients that have not come, each with the position of its bucket.
    """

    def __init__(
        self, members: Sequence[Sequence[int]], start: Callable[[int], Work[Any]], *, overlapped: bool = True
    ) -> None:
        self.missing = {member: position for position, bucket in enumerate(members) for member in bucket}
        self._count = len(self.missing)
        self._incomplete = [len(bucket) for bucket in members]  # number of missing gradients, by bucket
        self._start = start
        self._overlapped = overlapped
        self._works: list[Work[Any]] = []

    @property
    def has_begun(self) -> bool:
        """True if one of the gradients has come."""
        return len(self.missing) < self._count

    def ready(self, member: int) -> None:
        """Record that a missing gradient is in its bucket."""
        self._incomplete[self.missing.pop(member)] -= 1
        if self._overlapped:
            self.start_complete()

    def start_complete(self) -> None:
        """Start, in order, the next buckets that are complete, up to the first that is not."""
        while len(self._works) < len(self._incomplete) and not self._incomplete[len(self._works)]:
            self._works.append(self._start(len(self._works)))

    def results(self) -> Iterator[Any]:
        """Yield the results of the reductions that were started, in order, each when it is done.

        Raises:
            AxonError: a reduction failed.
        """
        for work in self._works:
            yield work.wait()
