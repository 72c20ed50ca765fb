"""`ElasticLoader`: batches of a data set for a training loop, each sample once an epoch, also if workers die or join.

Note: [Exactly once]
    The number of samples used in the epoch is committed with the step that used them (`ServerOptimizer.step`). The
    samples of the next step and their assignment to workers follow from that number and from the members alone
    (`data.elastic`). A step counts only among the members that its samples were dealt to. If the members have changed,
    the step is void before anything of it is sent. So only a commit or a skip moves the position, and all workers deal
    alike without messages to each other. A worker that joins or restores a checkpoint deals as the others do.

Note: [Between decisions]
    The program takes batches until it calls `optimizer.step()`. A step that was aborted has used none of the batches
    since the decision before: they come again, dealt anew if the members have changed. If the members are the same
    (another worker has replaced the dead one), a batch has the same tensors. It is fetched again if the program has
    changed its tensors, or if it contains other objects than tensors and plain values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from axon_ps.data.elastic import Coordinates, ElasticBatch, MicroBatch, Position, SamplePlan
from axon_ps.errors import InvalidRequest, Misuse, StepAborted
from axon_ps.parallel.fsdp.fsdp import FullyShardedDataParallel
from axon_ps.parallel.fsdp.steps import StepBatch, StepStatus
from axon_ps.parallel.fsdp.strategy import ShardingStrategy
from axon_ps.wire.committed import encoded
from axon_ps.worker.world import world_of

_MOST_ABORTS: Final = 8
"""Aborts of a step in a row, while the members stay, that are an error."""

_OURS: Final = ("sampler", "batch_sampler")


class ElasticLoader:
    """Batches for the steps of a model on the shard servers, from a `torch.utils.data.DataLoader`.

        loader = ElasticLoader(data, model, batch_size=64, num_workers=2)
        for epoch in loader.epochs(3):
            for x, y in loader:
                loss_function(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    All workers make the same loader. `batch_size` is the number of samples of a step, over all workers together. A
    worker gets its micro-batches of them one after the other. If it has several, `optimizer.step()` and `zero_grad()`
    do nothing until the last, so each of its batches is one iteration of the loop. The gradient of the step is the mean
    over all its samples, if the loss is the mean over its batch. When a worker leaves, the others have more
    micro-batches until another replaces it: a step has the same samples.

    When a step has committed, or was skipped because its gradients were not finite, the position in the epoch is
    committed with it. When a step was aborted, its batches come again in the same loop. The position is in every
    checkpoint, and a restored job goes on with the remaining samples.

    Args:
        dataset: a data set with a length; the same on every worker.
        model: a wrapped model; the position is committed with its steps. NO_SHARD and asynchronous policies are
            refused, as their steps are not decisions of all workers: use `DistributedSampler` there.
        batch_size: samples of a step, by all workers together.
        micro_batch_size: most samples that a worker gets at a time; None = an equal share for each worker that the job
            starts with, so that no worker needs more memory when others leave. `batch_size` = all its samples of a step
            at once.
        shuffle: True for another order in each epoch, False for the order of the data set.
        seed: seed of the orders.
        drop_last: True = leave out an epoch's end if it is less than a step's batch; False = the last step is smaller.
        name: name of the position among the values that are committed with the model's steps.
        options: those of `torch.utils.data.DataLoader` for fetching samples: `num_workers`, `collate_fn`,
            `pin_memory`, `persistent_workers` (without it loader workers are started again when the members change;
            spawning takes seconds) and so on.

    Attributes:
        samples: indices in the data set of the last batch given; empty if that batch counts for nothing, since the data
            set ended with fewer samples than there are workers.

    Raises:
        InvalidRequest: the data set has no length or is too small, or a step of the model is not a decision of all
            workers, or an option is not allowed.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: FullyShardedDataParallel,
        batch_size: int,
        *,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        name: str = "samples",
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InvalidRequest("the data set has no length, so its samples cannot be dealt; give one that has")
        if not isinstance(model, FullyShardedDataParallel):
            raise InvalidRequest(
                f"model is a {type(model).__name__}; the position is committed with the steps of a model that is "
                "wrapped in FullyShardedDataParallel: wrap it first, or use DistributedSampler"
            )
        if model.strategy is ShardingStrategy.NO_SHARD or model.spec.policy.asynchronous:
            what = "NO_SHARD" if model.strategy is ShardingStrategy.NO_SHARD else str(model.spec.policy)
            raise InvalidRequest(
                f"under {what} a step is no decision of all workers that the position could be a part of; use "
                "DistributedSampler and advance()"
            )
        if wrong := [option for option in _OURS if option in options]:
            raise InvalidRequest(f"ElasticLoader deals the samples itself; leave {wrong[0]}= out")
        if micro_batch_size is None:
            micro_batch_size = -(-batch_size // max(1, world_of(model.process_group).initial_world_size))
        self.samples: list[int] = []
        self._runtime = model.runtime
        self._name = name
        self._plan = SamplePlan(
            len(dataset),
            ElasticBatch(samples=batch_size, at_a_time=micro_batch_size),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._prefetched = _Prefetched(dataset, self._plan, options)
        self._again: deque[_Given] = deque()  # batches to give again, before the prefetched ones
        self._given: list[_Given] = []  # since the last decision
        self._decisions = self._aborts = 0
        self._generation = self._epoch = 0  # of the batches given
        self._iteration = 0
        self._read(self._runtime.committed)

    # ------------------------------------------------------------------ the position

    @property
    def position(self) -> Position:
        """The position at which the next step begins, after the last commit or skip."""
        return self._plan.current(self._read(self._runtime.committed))

    @property
    def epoch(self) -> int:
        """The data epoch of the next step."""
        return self.position.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield each data epoch of the first `count` that is not over yet. Iterate over the loader once in each.

        The first is the epoch that the job is in, also for a worker that joins later.

        Raises:
            Misuse: an epoch went by without a step.
        """
        while (epoch := self.epoch) < count:
            decisions = self._runtime.decisions
            yield epoch
            if decisions == self._runtime.decisions:
                raise Misuse(f"epoch {epoch} went by without optimizer.step(), so none of its samples has been used")

    def __len__(self) -> int:
        """Return the number of batches that this worker gets in the rest of the epoch, if the members stay."""
        return sum(1 for _ in self._plan.micro_batches(self.position, self._runtime.coordinates))

    def _read(self, committed: Mapping[str, str]) -> Position:
        return self._plan.position(committed.get(self._name))

    # ------------------------------------------------------------------ the batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker until the end of the epoch. See Note: [Between decisions].

        Raises:
            Misuse: a later iteration had begun before this one was continued; a batch of another loader is pending for
                the model's step; or a batch that counts for nothing follows batches whose gradients are accumulated.
            InvalidRequest: the job's position is of another data set.
            StepAborted: the step was aborted again and again while the members stayed; the message says why.
            Timeout: the job is not complete; the message says what is missing.
            MemberLost: this worker is not a member any more.
        """
        self._iteration += 1
        return self._batches(self._iteration)

    def close(self) -> None:
        """Forget the batches given since the last decision. The loader's workers end, unless they are persistent."""
        if self._is_undecided:
            self._runtime.accumulation.batch = None
        self._given = []
        self._again.clear()
        self._prefetched.close()

    def _batches(self, iteration: int) -> Iterator[Any]:
        if not (self._is_undecided and self._runtime.has_gradients):
            self._given = []
            self._deal(self._runtime.step_status())
        elif (after := self._given[-1].micro.after).samples >= self._plan.end:
            self._prefetched.begin(self._plan.current(after), self._prefetched.coordinates)
        while (given := self._next()) is not None:
            yield given.batch()
            if iteration != self._iteration:
                raise Misuse("another iteration over this loader has begun; go on with that one")

    def _next(self) -> _Given | None:
        """Return the next batch, or None at the end of the epoch."""
        if self._given and not self._is_undecided and not self._goes_on():
            return None
        given = self._again.popleft() if self._again else self._prefetched.next()
        if given is None:
            return None
        pending = self._runtime.accumulation.batch
        if pending is not None and self._name not in pending.commit:
            raise Misuse(
                "a batch of another loader is waiting for the model's step; take all that a step needs from one data "
                "set (torch.utils.data.StackDataset makes one of several), or close() the other loader"
            )
        self._given.append(given)
        micro = given.micro
        self._epoch = micro.before.epoch
        self.samples = self._plan.indices(micro) if micro.weight else []
        self._runtime.accumulation.begin(
            StepBatch(
                generation=self._generation,
                weight=micro.weight,
                index=micro.index,
                count=micro.count,
                commit=encoded({self._name: self._plan.state(micro.after)}),
            ),
            adds=self._runtime.has_gradients,
        )
        return given

    @property
    def _is_undecided(self) -> bool:
        """True if batches were given, and no step has been decided since."""
        return bool(self._given) and self._decisions == self._runtime.decisions

    def _goes_on(self) -> bool:
        """Continue after a decision, and return True, or return False if the epoch is over."""
        status = self._runtime.step_status()
        reached = self._read(status.committed)
        if reached.samples >= self._plan.end and reached.epoch >= self._epoch:
            self._given = []
            return False
        self._deal(status)
        return True

    def _deal(self, status: StepStatus) -> None:
        """Continue at the position of the last decision, with no batch given since then."""
        begin = self._plan.current(self._read(status.committed))
        given, self._given = self._given, []
        aborted = bool(given) and begin == given[0].micro.before
        self._aborts = self._aborts + 1 if aborted and status.generation == self._generation else 0
        if self._aborts >= _MOST_ABORTS:
            raise StepAborted(
                f"the step at sample {begin.samples} of epoch {begin.epoch} was aborted {self._aborts} times in a row "
                f"although the members stayed: {self._runtime.last_reason}"
            )
        self._generation, self._decisions = status.generation, self._runtime.decisions
        if status.coordinates == self._prefetched.coordinates:
            if given and begin == given[-1].micro.after:
                return
            if aborted and all(each.is_unchanged for each in given):
                self._again.extendleft(reversed(given))
                return
        self._again.clear()
        self._prefetched.begin(begin, status.coordinates)


class _Given:
    """A batch that is given to the program, perhaps more than once.

    Args:
        micro: the micro-batch that it was fetched for.
        batch: the fetched values.
    """

    def __init__(self, micro: MicroBatch, batch: Any) -> None:
        self.micro = micro
        self._first: Any = batch
        self._leaves, self._tree = pytree.tree_flatten(batch)
        self._versions = [_version_of(leaf) for leaf in self._leaves]

    @property
    def is_unchanged(self) -> bool:
        """True if, by torch's version counters, the program has not changed the batch."""
        return None not in self._versions and self._versions == [_version_of(leaf) for leaf in self._leaves]

    def batch(self) -> Any:
        """Return the batch. Later calls return it in new containers, since the program may have changed the first."""
        first, self._first = self._first, None
        return pytree.tree_unflatten(self._leaves, self._tree) if first is None else first


def _version_of(leaf: Any) -> int | None:
    """Return a number that changes with the value, or None if there is no such number."""
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else leaf._version
    return 0 if leaf is None or isinstance(leaf, (bool, int, float, str, bytes)) else None


class _Indices:
    """The indices of the batches to fetch: a batch sampler, in torch's terms."""

    def __init__(self, plan: SamplePlan) -> None:
        self._plan = plan
        self.position, self.coordinates = Position(), Coordinates()

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._plan.indices, self._plan.micro_batches(self.position, self.coordinates))


class _Prefetched:
    """The batches of the rest of an epoch, fetched ahead if the loader has workers.

    Args:
        dataset: the data set.
        plan: the steps over it.
        options: options of torch's loader.
    """

    def __init__(self, dataset: Dataset[Any], plan: SamplePlan, options: Mapping[str, Any]) -> None:
        self._plan = plan
        self._indices = _Indices(plan)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self._batches: Iterator[Any] = iter(())

    @property
    def coordinates(self) -> Coordinates:
        """The `Coordinates` of the worker that the batches are for."""
        return self._indices.coordinates

    def begin(self, position: Position, coordinates: Coordinates) -> None:
        """Drop the fetched batches, and begin at a position."""
        self.close()
        self._indices.position, self._indices.coordinates = position, coordinates
        self._micro_batches = self._plan.micro_batches(position, coordinates)
        self._batches = iter(self._loader)

    def next(self) -> _Given | None:
        """Return the next batch, or None at the end of the epoch."""
        micro = next(self._micro_batches, None)
        if micro is None:
            self.close()
            return None
        return _Given(micro, next(self._batches))

    def close(self) -> None:
        """Drop the fetched batches. The loader's workers end, unless they are persistent."""
        self._micro_batches = self._batches = iter(())


__all__ = ["ElasticLoader"]
