"""The samples of each step and of each worker, for any set of members. Pure: it needs no framework and no world.

An epoch is an order of all samples (see `Permutation`). A step takes the next `batch_size` samples of it, over all
workers together. They are cut into micro-batches of nearly equal size, at least one for each replica. The micro-batches
are dealt to the replicas round-robin. With fewer replicas each takes more of them, and the step has the same samples.
The number of samples used determines the samples of the next step, so only that number is stored. From it and the
members every worker derives its micro-batches.

Invariants:
- Each sample of a step is in exactly one micro-batch of a weight above 0, over all workers.
- Their weights add up to 1, and each is the micro-batch's part of the step's samples.
- With the same members the same samples are cut in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from axon_ps.data.permutation import Permutation, check
from axon_ps.errors import InvalidRequest
from axon_ps.texts import value_of_json

_ORDER: Final = ("length", "shuffle", "seed")
"""Fields that a plan must share with a stored position."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The coordinates of a worker among those that take part in a step.

    Attributes:
        replica: the number of its replica; -1 = it is in none, and its samples count for nothing.
        num_replicas: number of replicas.
        index: its number among the workers of its replica. All of them compute the same number of micro-batches.
        workers: number of workers of a replica.
    """

    replica: int = 0
    num_replicas: int = 1
    index: int = 0
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data.

    Attributes:
        epoch: the data epoch.
        samples: samples of it that were used, by all workers together.
    """

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one gradient computation of a worker.

    Attributes:
        before: the position at which the step begins.
        after: the position that it leads to.
        begin, end: their range in the order of the epoch.
        weight: their fraction of the step's samples; 0 if there are too few, so that they are another worker's.
        index: its number among the worker's micro-batches of this step.
        count: the number of those.
    """

    before: Position
    after: Position
    begin: int
    end: int
    weight: float
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class ElasticBatch:
    """The batch of a step, and how it is cut.

    Args:
        samples: samples of a step, over all workers.
        at_a_time: maximum number of samples in a micro-batch.

    Raises:
        InvalidRequest: one of them is less than 1.
    """

    samples: int
    at_a_time: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.at_a_time < 1:
            raise InvalidRequest(
                f"a step was to take {self.samples} samples, {self.at_a_time} at a time; both must be at least 1"
            )

    def cut(self, begin: int, count: int, coordinates: Coordinates) -> list[tuple[int, int]]:
        """Return a worker's ranges of a step's samples, which are `count` samples from `begin` on.

        There is at least one range. It may be empty if there are fewer samples than workers. The shortest come first.
        """
        if coordinates.replica < 0:
            return [(begin, begin)]
        fitting = -(-count // (self.at_a_time * coordinates.workers))
        ranges = _divided(begin, count, max(fitting, min(coordinates.num_replicas, count // coordinates.workers), 1))
        mine = ranges[coordinates.replica :: coordinates.num_replicas] or [(begin, begin)]
        return [_divided(b, e - b, coordinates.workers)[coordinates.index] for b, e in reversed(mine)]


def _divided(begin: int, count: int, ranges: int) -> list[tuple[int, int]]:
    """Return ranges of nearly equal length, the longer ones first."""
    each, longer = divmod(count, ranges)
    ends = [begin + each * (i + 1) + min(i + 1, longer) for i in range(ranges)]
    return list(zip([begin, *ends[:-1]], ends, strict=True))


class SamplePlan:
    """The steps of a data set's epochs.

    Args:
        length: samples of the data set.
        batch: the batch of a step.
        shuffle: whether each epoch has another order. If not, the order is that of the data set.
        seed: selects the orders.
        drop_last: leave out an incomplete batch at the end of an epoch. If not, the last step is smaller.

    Attributes:
        end: number of samples of an epoch that are used.

    Raises:
        InvalidRequest: a number is out of range, or an epoch has no step.
    """

    def __init__(
        self, length: int, batch: ElasticBatch, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        check(length, seed, 0)
        self.length, self.batch = length, batch
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.end = length // batch.samples * batch.samples if drop_last else length
        self._order: Permutation | None = None
        self._order_of = -1
        if not self.end:
            raise InvalidRequest(
                f"the data set has {length} samples, so there is no step of {batch.samples}; make the batch smaller, "
                "or leave drop_last out"
            )

    def current(self, position: Position) -> Position:
        """Return the same position; at the end of an epoch, the beginning of the next one."""
        return position if position.samples < self.end else Position(epoch=position.epoch + 1)

    def micro_batches(self, position: Position, coordinates: Coordinates) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a worker in the rest of an epoch, as long as the members stay the same."""
        while (count := min(self.batch.samples, self.end - position.samples)) > 0:
            begin, after = position.samples, Position(epoch=position.epoch, samples=position.samples + count)
            ranges = self.batch.cut(begin, count, coordinates)
            for index, (first, end) in enumerate(ranges):
                yield MicroBatch(
                    before=position,
                    after=after,
                    begin=first if first < end else begin,
                    end=end if first < end else begin + 1,
                    weight=(end - first) / count,
                    index=index,
                    count=len(ranges),
                )
            position = after

    def indices(self, micro: MicroBatch) -> list[int]:
        """Return the indexes of a micro-batch's samples in the data set."""
        positions, epoch = np.arange(micro.begin, micro.end, dtype=np.int64), micro.before.epoch
        if self.shuffle and self._order_of != epoch:
            self._order, self._order_of = Permutation(self.length, self.seed, epoch), epoch
        indices: list[int] = (positions if self._order is None else self._order[positions]).tolist()
        return indices

    # ------------------------------------------------------------------ the stored state

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position, with everything that the plans of all workers must agree on."""
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            **{name: getattr(self, name) for name in _ORDER},
            "drop_last": self.drop_last,
            "batch_size": self.batch.samples,
            "micro_batch_size": self.batch.at_a_time,
        }

    def position(self, state: str | None) -> Position:
        """Return the position in a stored state, which may be of another batch size; the beginning if it is None.

        Raises:
            InvalidRequest: it is of another data set or order, or is not a state.
        """
        if state is None:
            return Position()
        try:
            values = value_of_json(state, "the position")
            position = Position(epoch=int(values["epoch"]), samples=int(values["samples"]))
            stored = {name: values[name] for name in _ORDER}
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"this is no position in a data set: {state[:200]}") from error
        mine = {name: getattr(self, name) for name in _ORDER}
        if stored != mine or position.epoch < 0 or not 0 <= position.samples <= self.length:
            raise InvalidRequest(
                f"the job is at sample {position.samples} of epoch {position.epoch} of {_named(stored)}, and this "
                f"loader has {_named(mine)}; make it as before, or give it a name of its own to begin anew"
            )
        return position


def _named(order: dict[str, Any]) -> str:
    return f"{order['length']} samples with shuffle={order['shuffle']}, seed={order['seed']}"
