"""`Permutation`: the shuffled order of an epoch, any range of which is computed without the rest.

A short order sorts random keys, so every order is as likely as every other. Long ones are computed position by
position, by a cipher on the smallest power of two that is large enough. The cipher is a Feistel network of alternating
halves. A result beyond the end is enciphered again until it is not (Black and Rogaway 2002, Ciphers with Arbitrary
Finite Domains). So a billion samples take no memory, and an epoch resumes anywhere at once.

Invariants:
- An order is a function of (length, seed, epoch) alone, on every machine and with every version of numpy. Of numpy only
  the raw stream of Philox is used, which never changes. All arithmetic is on integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from axon_ps.errors import InvalidRequest

SHORT = 1 << 16
"""Up to this length an order is kept in memory."""

_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # MurmurHash3's finalizer
_SHIFT = np.uint64(33)


class Permutation:
    """An order of the numbers from 0 to length - 1.

    Args:
        length: number of elements, from 0 to 2**62 - 1.
        seed: selects the order, with `epoch`; from 0 to 2**64 - 1.
        epoch: the data epoch; from 0 to 2**64 - 1.

    Raises:
        InvalidRequest: a number is out of range.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        check(length, seed, epoch)
        self.length = length
        random = np.random.Philox(key=seed | epoch << 64)
        self._short: NDArray[np.int64] | None = None
        if length <= SHORT:
            self._short = np.argsort(random.random_raw(length), kind="stable").astype(np.int64)
            return
        self._keys = random.random_raw(_ROUNDS)
        bits = (length - 1).bit_length()
        self._halves = bits // 2, bits - bits // 2

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values at some positions.

        Args:
            positions: i64[n], each from 0 to length - 1.

        Returns:
            i64[n].
        """
        if self._short is not None:
            return self._short[positions]
        result = self._encipher(positions.astype(np.uint64))
        while (beyond := result >= np.uint64(self.length)).any():
            result[beyond] = self._encipher(result[beyond])
        return result.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers of `sum(self._halves)` bits."""
        high_bits, low_bits = self._halves
        for key in self._keys:
            high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
            x = (low << np.uint64(high_bits)) | (high ^ (_mixed(low + key) >> np.uint64(64 - high_bits)))
            high_bits, low_bits = low_bits, high_bits
        return x


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of 64 bits: every bit of the result depends on every bit of `z`."""
    for multiplier in _MULTIPLIERS:
        z = (z ^ (z >> _SHIFT)) * multiplier
    return z ^ (z >> _SHIFT)


def check(length: int, seed: int, epoch: int) -> None:
    """Check that there is such an order.

    Raises:
        InvalidRequest: a number is out of range.
    """
    for name, value, bits in (("length", length, 62), ("seed", seed, 64), ("epoch", epoch, 64)):
        if not 0 <= value < 1 << bits:
            raise InvalidRequest(f"the {name} is {value}; it goes from 0 to 2**{bits} - 1")
