"""Gradient chunks that arrived out of order, kept until they can be added. Pure.

Note: [Chunks that are ahead]
    Chunks are added in replica order, so that a sum has the same bits in whatever order they arrive. A replica that is
    ahead, for example with fewer tokens in its batch, would wait for the others at every chunk of its backward pass.
    That would be a barrier at every unit. On-demand communication is to avoid such barriers ("Revisiting Parameter
    Server in LLM Post-Training", ICLR 2026). So a chunk that arrives out of order is queued unchanged, and added after
    those before it. The order of additions stays the same, and with it every bit. The alternative, a sum that does not
    depend on the order (Demmel and Nguyen, "Parallel Reproducible Summation", 2015), takes two to six times the memory
    for every element at all times. Chunks beyond the memory limit are not accepted before they are next in order. With
    a limit of 0, no chunk is queued. A chunk that is next in order needs no queue memory, so sums always progress.
"""

from __future__ import annotations

from axon_ps.compress import cast
from axon_ps.kernels.digest import digest
from axon_ps.types import Array, DType


class QueueLimit:
    """The memory of a server for queued chunks of all its models.

    Args:
        limit_bytes: the most bytes; 0 = no chunk is queued.

    Attributes:
        limit_bytes: as given.
        queued_bytes: bytes in use.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes`; returns False if they are not free. With a limit of 0 even 0 bytes are refused."""
        if not self.limit_bytes or self.queued_bytes + nbytes > self.limit_bytes:
            return False
        self.queued_bytes += nbytes
        return True


class QueuedChunks:
    """The chunks queued for one accumulator: a gradient (or None) and its digest, by chunk and order."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int], tuple[Array | None, int]] = {}
        self._limit = QueueLimit()

    def __contains__(self, at: tuple[int, int]) -> bool:
        """Return True if a gradient of chunk `at[0]` with order `at[1]` is queued."""
        return at in self._chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all queued chunks."""
        return sum(_nbytes(grad) for grad, _ in self._chunks.values())

    def put(self, index: int, order: int, grad: Array | None, limit: QueueLimit, *, borrowed: bool) -> bool:
        """Queue a chunk; returns False if there is not enough memory for it.

        Args:
            index: of the chunk.
            order: number of replicas to be added before it.
            grad: as `Accumulator.add` takes it.
            limit: the server's limit; the same in every call.
            borrowed: `grad` is in the sender's memory, so a copy is kept.
        """
        if not limit.take(_nbytes(grad)):
            return False
        self._limit = limit
        if grad is not None and borrowed:
            grad = grad.copy()
        self._chunks[index, order] = grad, _digest(grad)
        return True

    def take(self, index: int, order: int) -> tuple[Array | None, bool]:
        """Remove a chunk that is next in order; returns (gradient, True if its bits are those that arrived)."""
        grad, came = self._chunks.pop((index, order))
        self._limit.queued_bytes -= _nbytes(grad)
        return grad, _digest(grad) == came

    def clear(self) -> None:
        """Drop all chunks."""
        self._limit.queued_bytes -= self.nbytes
        self._chunks.clear()


def warm_up(dtype: DType) -> None:
    """Compile the digests of chunks of `dtype`. Any thread may call it."""
    for chunk in cast.examples(dtype):
        _digest(chunk)


def _nbytes(grad: Array | None) -> int:
    return 0 if grad is None else grad.nbytes


def _digest(grad: Array | None) -> int:
    return 0 if grad is None else digest(grad.view(f"u{grad.itemsize}"), 0, grad.size)
