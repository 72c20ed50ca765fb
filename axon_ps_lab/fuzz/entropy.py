"""The choices of a fuzzer, made by a seed or by the bytes of a coverage-guided engine."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Entropy:
    """Choices from a seed: the same seed, the same choices.

    Args:
        seed: any text.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        """Return a number of 0 to n - 1."""
        return int(self._random.random() * n)

    def bits(self, n: int) -> int:
        """Return a number of `n` bits."""
        return self._random.getrandbits(n)

    def once_in(self, n: int) -> bool:
        """Return True once in `n` times."""
        return self.below(n) == 0

    def pick(self, among: Sequence[T]) -> T:
        """Return one of several."""
        return among[self.below(len(among))]

    def data(self, size: int) -> bytes:
        """Return any `size` bytes."""
        return self._random.randbytes(size)


class GivenEntropy(Entropy):
    """Choices from `data`, a byte for each where that is enough. After its end they come from a seed made of it.

    So a change of one byte changes one choice, which is what a coverage-guided engine needs.

    Args:
        data: data of the engine.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(str(zlib.crc32(data)))
        self._data = memoryview(data)
        self._at = 0

    def below(self, n: int) -> int:
        """See `Entropy.below`."""
        size = 1 if n <= 256 else 4
        return int.from_bytes(self._take(size), "little") % n if self._has(size) else super().below(n)

    def bits(self, n: int) -> int:
        """See `Entropy.bits`."""
        size = (n + 7) // 8
        return int.from_bytes(self._take(size), "little") >> (8 * size - n) if self._has(size) else super().bits(n)

    def data(self, size: int) -> bytes:
        """See `Entropy.data`."""
        return bytes(self._take(size)) if size <= 64 and self._has(size) else super().data(size)

    def _has(self, size: int) -> bool:
        return self._at + size <= len(self._data)

    def _take(self, size: int) -> memoryview:
        self._at += size
        return self._data[self._at - size : self._at]
