"""Gradient chunks that came before their turn, kept until it comes. Pure.

Note: [Chunks that are ahead]
    Chunks are added in replica order, so that a sum has the same bits whatever arrives first. A replica that is ahead,
    with fewer tokens in its batch say, would wait for the others at every chunk of its backward pass: a barrier at
    every unit, which on-demand communication is to do without ("Revisiting Parameter Server in LLM Post-Training", ICLR
    2026). So what comes before its turn is kept as it came, and added when its turn comes. The order of additions, and
    with it every bit, stays as it is, where a sum that does not depend on the order (Demmel and Nguyen, "Parallel
    Reproducible Summation", 2015) would take two to six times the memory for every element at all times. What the
    memory for it does not suffice for waits, as everything does with a limit of 0; a replica whose turn it is needs
    none, so the sums go on.
"""

from __future__ import annotations

from axon_ps.compress import cast
from axon_ps.kernels.digest import digest
from axon_ps.types import Array, DType


class QueueLimit:
    """The memory of a server for chunks that are ahead, of all its models.

    Args:
        limit_bytes: most of it; 0 = none is kept.

    Attributes:
        limit_bytes: as given.
        queued_bytes: how much of it is in use.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0

    def take(self, nbytes: int) -> bool:
        """Use so much; whether there was as much. With a limit of 0 what takes no memory is not kept either."""
        if not self.limit_bytes or self.queued_bytes + nbytes > self.limit_bytes:
            return False
        self.queued_bytes += nbytes
        return True


class QueuedChunks:
    """The chunks that wait at one accumulator: by chunk and order, a gradient (or None) and its digest."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int], tuple[Array | None, int]] = {}
        self._limit = QueueLimit()

    def __contains__(self, at: tuple[int, int]) -> bool:
        """Whether there is chunk `at[0]` of the replica whose turn comes after `at[1]` others."""
        return at in self._chunks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(_nbytes(grad) for grad, _ in self._chunks.values())

    def put(self, index: int, turn: int, grad: Array | None, limit: QueueLimit, *, borrowed: bool) -> bool:
        """Keep a chunk; whether there was memory for it.

        Args:
            index: of the chunk.
            turn: after how many others it is to be added.
            grad: as `Accumulator.add` takes it.
            limit: the server's, which is the same in every call.
            borrowed: its memory is the sender's, so that a copy is kept.
        """
        if not limit.take(_nbytes(grad)):
            return False
        self._limit = limit
        if grad is not None and borrowed:
            grad = grad.copy()
        self._chunks[index, turn] = grad, _digest(grad)
        return True

    def take(self, index: int, turn: int) -> tuple[Array | None, bool]:
        """(gradient, whether its bits are those that came), once its turn has come; it is kept no more."""
        grad, came = self._chunks.pop((index, turn))
        self._limit.queued_bytes -= _nbytes(grad)
        return grad, _digest(grad) == came

    def clear(self) -> None:
        """Keep nothing."""
        self._limit.queued_bytes -= self.nbytes
        self._chunks.clear()


def warm_up(dtype: DType) -> None:
    """Compile what looks at chunks of `dtype`. Any thread."""
    for chunk in cast.examples(dtype):
        _digest(chunk)


def _nbytes(grad: Array | None) -> int:
    return 0 if grad is None else grad.nbytes


def _digest(grad: Array | None) -> int:
    return 0 if grad is None else digest(grad.view(f"u{grad.itemsize}"), 0, grad.size)
