"""`DistributedSampler`: every sample once, whatever happens to the number of replicas; resuming; torch's loader."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import axon_ps
from axon_ps.data import DistributedSampler, sampler
from axon_ps.errors import InvalidRequest, Misuse


def take(replica: DistributedSampler, count: int) -> list[int]:
    """Yield and consume."""
    taken = list(itertools.islice(iter(replica), count))
    replica.advance(len(taken))
    return taken


def replicas(dataset: int, n: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(dataset, n, rank, **options) for rank in range(n)]


STRETCHES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.sampled_from(["resize", "load", "fetch"])))


@settings(max_examples=100)
@given(
    length=st.integers(0, 120),
    last=st.integers(1, 9),
    stretches=STRETCHES,
    shuffle=st.booleans(),
    tail=st.sampled_from(["pad", "drop", "uneven"]),
    epoch=st.integers(0, 3),
)
def test_every_sample_once_whatever_happens_to_the_replicas(
    length: int, last: int, stretches: list[tuple[int, int, str]], shuffle: bool, tail: str, epoch: int
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": tail == "drop", "pad": tail == "pad"}
    taken: list[int] = []
    state: dict[str, Any] | None = None
    current: list[DistributedSampler] = []
    for n, steps, how in [*stretches, (last, 10**6, "load")]:
        if how == "load" or len(current) < n:  # anew, from a checkpoint; else those that are left are resized
            current = replicas(length, n, **options)
            for replica in current:
                replica.set_epoch(epoch)
                if state is not None:
                    replica.load_state_dict(state)
        else:
            current = current[-n:]
            for rank, replica in enumerate(current):
                replica.resize(n, rank)
        if tail == "uneven" and steps < 10**6:  # the last samples of an uneven epoch are no step of all replicas
            steps = min(steps, (length - current[0].position) // n)
        if how == "fetch":
            for replica in current:  # what is fetched ahead counts for nothing
                list(itertools.islice(iter(replica), 3))
        lists = [take(replica, steps) for replica in current]
        taken += [index for row in itertools.zip_longest(*lists) for index in row if index is not None]
        if tail != "uneven":
            assert len({len(samples) for samples in lists}) == 1
        states = [replica.state_dict() for replica in current]
        if steps < 10**6:
            assert all(json.loads(json.dumps(s)) == states[0] for s in states)
            state = states[0]
    counts, most = Counter(taken), max(n for n, _, _ in [*stretches, (last, 0, "")])
    if tail == "drop":
        assert max(counts.values(), default=1) == 1
        assert length - len(counts) < last
    elif tail == "uneven":
        assert counts == Counter(range(length))
    else:
        assert sorted(counts) == list(range(length))
        assert len(taken) - length < most
    if shuffle and tail == "uneven":  # in the order of the epoch, whoever took them
        alone = DistributedSampler(length, 1, 0, seed=5)
        alone.set_epoch(epoch)
        assert taken == list(alone)


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_shuffling_it_deals_as_torch_does(drop_last: bool) -> None:
    for length, n in itertools.product((1, 2, 7, 8, 9, 24), (1, 2, 3, 5)):
        if length < n and drop_last:
            continue  # torch's pads that
        for rank, replica in enumerate(replicas(length, n, shuffle=False, drop_last=drop_last)):
            theirs = TorchSampler(range(length), n, rank, shuffle=False, drop_last=drop_last)
            assert (list(replica), len(replica)) == (list(theirs), len(theirs))


def test_steps_have_the_same_samples_with_any_number_of_replicas() -> None:
    def batches(n: int, size: int) -> list[set[int]]:
        lists = [list(r) for r in replicas(96, n)]
        return [{i for own in lists for i in own[k : k + size]} for k in range(0, 96 // n, size)]

    assert batches(1, 24) == batches(2, 12) == batches(3, 8) == batches(8, 3)


def test_epochs_have_orders_of_their_own() -> None:
    replica = DistributedSampler(50, 1, 0, seed=1)
    first = take(replica, 50)
    assert (len(replica), replica.position, list(replica)) == (0, 50, [])
    replica.set_epoch(0)  # the current one goes on, here at its end
    assert list(replica) == []
    replica.set_epoch(1)
    second = list(replica)
    assert list(replica) == second  # nothing was said to be consumed
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert list(DistributedSampler(50, 1, 0, seed=2)) != first
    assert list(DistributedSampler(range(50), 1, 0, seed=1)) == first


def test_a_loader_with_workers_fetches_ahead_and_nothing_is_lost() -> None:
    data = TensorDataset(torch.arange(40))
    seen: list[int] = []

    def train(replica: DistributedSampler, steps: int) -> None:
        loader = DataLoader(data, batch_size=3, sampler=replica, num_workers=1, prefetch_factor=4)
        for (batch,) in itertools.islice(loader, steps):
            seen.extend(batch.tolist())
            replica.advance(len(batch))

    first = DistributedSampler(data, 2, 0)
    train(first, 3)
    assert first._yielded > first._consumed == 9
    other = DistributedSampler(data, 2, 1)
    seen += take(other, 9)
    second = DistributedSampler(data, 1, 0, seed=77)  # the state says the order
    second.load_state_dict(first.state_dict())
    assert len(second) == 40 - 18
    train(second, 100)
    assert sorted(seen) == list(range(40))


def test_long_parts_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [list(r) for r in replicas(1000, 3)]
    monkeypatch.setattr(sampler, "_BLOCK", 7)
    assert [list(r) for r in replicas(1000, 3)] == whole


def test_an_iteration_ends_with_its_deal() -> None:
    replica = DistributedSampler(20, 2, 0)
    for change in (lambda: replica.resize(1, 0), lambda: replica.set_epoch(4), lambda: iter(replica)):
        iteration = iter(replica)
        next(iteration)
        change()
        with pytest.raises(Misuse, match="iterate over the loader anew"):
            next(iteration)


def test_a_state_needs_to_know_what_was_consumed() -> None:
    replica = DistributedSampler(20, 2, 0)
    assert replica.state_dict()["position"] == 0
    next(iter(replica))
    with pytest.raises(Misuse, match="call advance"):
        replica.state_dict()
    with pytest.raises(InvalidRequest, match="2 samples are said to be consumed; 1 have been yielded"):
        replica.advance(2)
    replica.advance(0)
    assert replica.state_dict()["position"] == 0
    replica.advance(1)
    assert replica.state_dict()["position"] == 2


def test_a_worker_in_no_replica_gets_no_samples() -> None:
    for options in ({}, {"pad": False}, {"drop_last": True}):
        alone = DistributedSampler(10, 0, -1, **options)
        assert (len(alone), list(alone), alone.position) == (0, [], 0)
        alone.resize(2, 1)
        assert len(list(alone)) == 5
        alone.advance(2)
        alone.resize(1, -1)
        assert (len(alone), list(alone), alone.position) == (0, [], 4)


def test_what_cannot_be_is_refused() -> None:
    for n, rank in ((0, 0), (2, 2), (2, -2)):
        with pytest.raises(InvalidRequest, match=f"replica {rank} of {n}"):
            DistributedSampler(10, n, rank)
    with pytest.raises(InvalidRequest, match="the seed is -1"):
        DistributedSampler(10, 1, 0, seed=-1)
    replica = DistributedSampler(10, 1, 0)
    with pytest.raises(InvalidRequest, match="the epoch is -1"):
        replica.set_epoch(-1)
    state = replica.state_dict()
    for wrong, words in (
        ({"length": 11}, "of a data set of 11; this one has 10"),
        ({"position": 11}, "at sample 11"),
        ({"seed": None}, "no sampler's state"),
        ({"epoch": -2}, "the epoch is -2"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            replica.load_state_dict(state | wrong)
    with pytest.raises(InvalidRequest, match="no sampler's state"):
        replica.load_state_dict({})
    assert replica.state_dict() == state


def test_it_is_exported_where_it_is_looked_for() -> None:
    assert axon_ps.data.DistributedSampler is axon_ps.parallel.DistributedSampler is DistributedSampler
