"""`DistributedSampler`: the samples of each replica, such that all replicas together take each once in an epoch.

Owns: the position in an epoch, and dealing the remaining samples to the replicas. Refuses: to guess the samples that
were trained on. The caller reports them by `advance`.

An epoch is an order of all samples (see `Permutation`). The rest of it, from a position on, is dealt out round-robin:
with R replicas, replica r takes positions begin + r, begin + r + R, begin + r + 2 R and so on. When the number of
replicas changes, the rest from the position reached is dealt out anew. So

- every sample is taken once in an epoch, however often the number of replicas changes. Only a remainder at the end is
  repeated (padding) or left out (`drop_last`): less than one sample for each replica.
- the samples of a step are one range of the order: R replicas with batches of B train on the same samples, step by
  step, as R/2 replicas with batches of 2 B.

Note: [Consumed, not yielded]
A loader's workers fetch ahead of the training loop, so some samples that the sampler has yielded were not trained on.
A state that counted yielded samples would skip these. The position is therefore moved by `advance` alone, which the
loop calls when a step has committed. No sample is lost when a step aborts: its samples have not been counted, and a new
iteration yields them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from axon_ps.data.permutation import Permutation, check
from axon_ps.errors import InvalidRequest, Misuse

_BLOCK = 1 << 14
"""Number of a replica's samples that are computed at a time."""


class DistributedSampler:
    """The samples of one replica: an iterable of indices, for example for `torch.utils.data.DataLoader(sampler=...)`.

    Every replica makes one with the same arguments except `rank`. It calls `set_epoch` before each epoch, and `advance`
    when samples have been trained on. An iteration begins after the samples consumed. There is one iteration at a time:
    a new one, `set_epoch`, `resize` and `load_state_dict` end the previous one.

    Args:
        dataset: the data set, of which only the length is used, or the length.
        num_replicas: replicas that share it: `world.num_replicas`, or `mesh.size("data")`.
        rank: this replica: `world.replica`, or `mesh.coordinate("data")`. A worker in no replica (-1) gets no samples.
        shuffle: whether each epoch has another order. If not, the order is that of the data set.
        seed: selects the orders; the same on every replica.
        drop_last: leave out the remainder at the end of the epoch.
        pad: without `drop_last`: repeat samples of the epoch's beginning, so that all replicas have equally many. If
            not, some have one more than others and every sample is taken exactly once: for evaluation.

    Attributes:
        epoch: the current data epoch.

    Raises:
        InvalidRequest: a number is out of range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.shuffle, self.seed, self.drop_last, self.pad = shuffle, seed, drop_last, pad
        self.epoch = 0
        self._begin = self._consumed = self._yielded = self._iteration = 0
        self._was_used = self._reports_consumed = False
        check(self.length, seed, self.epoch)
        self._deal(0, num_replicas, rank)

    # ------------------------------------------------------------------ iterating

    @property
    def position(self) -> int:
        """Samples of this epoch that all replicas together have consumed: the same on all that took equally many."""
        return min(self.length, self._begin + self._consumed * self.num_replicas)

    def __len__(self) -> int:
        """Return the number of samples that the next iteration yields."""
        left, n = self.length - self.position, self.num_replicas
        if self.rank < 0:
            return 0
        if self.drop_last:
            return left // n
        return -(-left // n) if self.pad else max(0, -(-(left - self.rank) // n))

    def __iter__(self) -> Iterator[int]:
        """Iterate over this replica's samples of the epoch that were not consumed yet.

        Raises:
            Misuse: the iteration was ended by a later one, `set_epoch`, `resize` or `load_state_dict`.
        """
        self._iteration += 1
        self._yielded = self._consumed
        return self._indices(self._iteration, self.position + self.rank, len(self))

    def _indices(self, iteration: int, first: int, count: int) -> Iterator[int]:
        order = Permutation(self.length, self.seed, self.epoch) if self.shuffle else None
        for begin in range(0, count, _BLOCK):
            steps = np.arange(begin, min(begin + _BLOCK, count), dtype=np.int64)
            positions = (first + steps * self.num_replicas) % self.length  # padding comes from the beginning
            for index in (positions if order is None else order[positions]).tolist():
                if iteration != self._iteration:
                    raise Misuse("the sampler began another iteration, epoch or deal; iterate over the loader anew")
                self._yielded += 1
                self._was_used = True
                yield index

    # ------------------------------------------------------------------ the position

    def advance(self, num_samples: int) -> None:
        """Record that this replica has consumed samples: call it when a step has committed, on every replica.

        Args:
            num_samples: number of this replica's samples since the last call: its batch.

        Raises:
            InvalidRequest: fewer have been yielded.
        """
        if not 0 <= num_samples <= self._yielded - self._consumed:
            raise InvalidRequest(
                f"{num_samples} samples are said to be consumed; {self._yielded - self._consumed} have been yielded "
                "and not been consumed yet"
            )
        self._consumed += num_samples
        self._reports_consumed = True

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Nothing changes if it is the current one.

        Raises:
            InvalidRequest: it is negative or too large.
        """
        check(self.length, self.seed, epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self._deal(0, self.num_replicas, self.rank)

    def resize(self, num_replicas: int, rank: int) -> None:
        """Deal out the rest of the epoch to another number of replicas. Every replica calls it at the same position.

        A new replica loads the state of another one instead (`load_state_dict`).

        Args:
            num_replicas: the new number of replicas.
            rank: the new rank of this one.

        Raises:
            InvalidRequest: there is no such replica.
        """
        self._deal(self.position, num_replicas, rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state within the epoch, for a checkpoint or a new replica: JSON values, the same on all replicas.

        It counts the samples consumed (see `advance`), not those yielded.

        Raises:
            Misuse: samples were yielded, and `advance` was never called.
        """
        if self._was_used and not self._reports_consumed:
            raise Misuse(
                "samples were yielded, and it was never said that any was consumed; call advance(samples) after every "
                "step (advance(0) if there was none): what a loader has fetched ahead must not count"
            )
        return {
            "epoch": self.epoch,
            "position": self.position,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a sampler, of any number of replicas. Its order and seed are taken over.

        Raises:
            InvalidRequest: it is of another data set, or is not a state. Nothing was changed.
        """
        try:
            epoch, position, length, seed = (int(state[k]) for k in ("epoch", "position", "length", "seed"))
            shuffle = bool(state["shuffle"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"this is no sampler's state: {dict(state)!r}") from error
        if length != self.length or not 0 <= position <= length:
            raise InvalidRequest(
                f"the state is at sample {position} of a data set of {length}; this one has {self.length}"
            )
        check(length, seed, epoch)
        self.epoch, self.seed, self.shuffle = epoch, seed, shuffle
        self._deal(position, self.num_replicas, self.rank)

    def _deal(self, position: int, num_replicas: int, rank: int) -> None:
        """Give each replica its part of the rest, from `position` on."""
        if not -1 <= rank < num_replicas:
            raise InvalidRequest(
                f"replica {rank} of {num_replicas} was asked for; they go from 0 to {num_replicas - 1}"
            )
        self.num_replicas, self.rank = num_replicas, rank
        self._begin, self._consumed, self._yielded = position, 0, 0
        self._iteration += 1
