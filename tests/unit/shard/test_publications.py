"""What a server retains for subscribers: one version for all, encoded once, never changed, within its memory limit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from axon_ps.compress import cast
from axon_ps.errors import Busy
from axon_ps.shard.core.publications import Publication, Publications, Subscriber, Wish
from axon_ps.types import DType
from axon_ps.wire.changes import apply_changes
from axon_ps.wire.frames import decode_chunk
from engine_driver import Servers, job_of, layout_of, one_group

LAYOUT = layout_of([100], [40], [30], frozen=[2])
SPEC = job_of(LAYOUT, chunk_numel=32)
BYTES = 4 * 170


class Published:
    """One server, and what it retains. A step subtracts 0.1."""

    def __init__(self, max_bytes: float = 1 << 20, retain_s: float = 10.0) -> None:
        self.servers = Servers(SPEC, optimizer=one_group(LAYOUT, lr=0.1))
        self.servers.upload([np.ones(u.numel, np.float32) for u in LAYOUT.units])
        self.counters: Counter[str] = Counter()
        self.publications = Publications(max_bytes, retain_s, self.counters)
        self.now_s = 0.0

    def subscriber(self, **wish: object) -> Subscriber:
        subscriber = Subscriber()
        self.publications.add(subscriber)
        self.reserve(subscriber, **wish)
        return subscriber

    def reserve(self, subscriber: Subscriber, dtype: DType = DType.F32, **wish: int) -> None:
        self.publications.reserve(subscriber, Wish(dtype=dtype, **wish))
        self.publish()

    def publish(self, epoch: int = 0) -> None:
        (engine,) = self.servers.engines
        made = self.publications.publish(epoch, engine.version, engine.slices.primaries, DType.F32, self.now_s)
        for publication, lacking in made:
            self.counters["encoded"] += sum(publication.encode(owned) for owned in lacking)

    def steps(self, count: int, units: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(count):
            grads = [np.ones(u.numel, np.float32) if i in units else None for i, u in enumerate(LAYOUT.units)]
            self.servers.train_step([grads])
            self.publish()

    def choose(self, subscriber: Subscriber, version: int, epoch: int = 0) -> Publication | None:
        return self.publications.choose(subscriber, epoch, version, (epoch, self.servers.version))


def elements(publication: Publication, number: int, since: int = -1) -> np.ndarray:
    payloads = [decode_chunk(frame)[1] for frame in publication.frames_since(number, since, changes=False)]
    return np.concatenate([np.frombuffer(p, publication.key[2].numpy) for p in payloads])


def versions(subscriber: Subscriber) -> list[int]:
    return [publication.key[1] for publication in subscriber.reserved]


def test_frames_of_the_same_dtype_are_shared_and_stay_as_they_were() -> None:
    p = Published()
    first, second = p.subscriber(), p.subscriber()
    (publication,) = first.reserved
    assert second.reserved[0] is publication
    assert publication.frames[0] is p.servers.engines[0].slices[0].wire.frames
    assert (p.counters["encoded"], p.counters["published"], p.publications.nbytes) == (0, 1, BYTES)
    p.steps(2)
    assert versions(first) == versions(second) == [0, 1, 2]
    np.testing.assert_array_equal(elements(publication, 0), np.ones(100, np.float32))
    chosen = p.choose(first, 2)
    assert chosen is not None
    np.testing.assert_allclose(elements(chosen, 1), np.full(40, 0.8), rtol=1e-6)
    assert versions(first) == [2]
    assert versions(second) == [0, 1, 2]


def test_another_dtype_is_encoded_once_a_version() -> None:
    p = Published()
    subscribers = [p.subscriber(dtype=DType.BF16) for _ in range(4)]
    p.steps(1)
    assert p.counters["encoded"] == 2 * (4 + 2 + 1)
    publication = p.choose(subscribers[3], 1)
    assert publication is not None
    assert publication.complete
    expected = cast.encoded(np.full(100, np.float32(1) - np.float32(0.1)), DType.BF16)
    np.testing.assert_array_equal(elements(publication, 0), expected)


def test_what_did_not_change_is_not_sent() -> None:
    p = Published()
    subscriber = p.subscriber()
    p.steps(1, units=(0,))
    publication = p.choose(subscriber, 1)
    assert publication is not None
    sent = [len(publication.frames_since(n, 0, changes=False)) for n in range(3)]
    assert sent == [4, 0, 0]
    assert [len(publication.frames_since(n, -1, changes=False)) for n in range(3)] == [4, 2, 1]


def test_changes_make_the_newer_version_of_the_older_one() -> None:
    p = Published()
    subscriber = p.subscriber()
    base = p.choose(subscriber, 0)
    assert base is not None
    p.publications.done(subscriber, compare=True)
    p.reserve(subscriber, min_version=1)
    grad = np.zeros(100, np.float32)
    grad[[3, 50]] = 1.0
    p.servers.train_step([[grad, None, None]])
    p.publish()
    assert subscriber.base is base
    assert not base.dropped
    publication = p.choose(subscriber, 1)
    assert publication is not None
    publication.encode_changes(base)
    assert publication.has_changes(base)
    made = elements(base, 0).copy()
    for frame in publication.frames_since(0, 0, changes=True):
        header, payload = decode_chunk(frame)
        assert header.compressed
        apply_changes(payload, made[header.offset : header.offset + header.numel])
    np.testing.assert_array_equal(made, elements(publication, 0))
    assert p.publications.nbytes == 2 * BYTES + sum(map(len, publication.frames_since(0, 0, changes=True)))
    p.publications.done(subscriber, compare=False)
    assert len(p.publications) == 0


def test_only_multiples_and_only_from_the_oldest_wanted_on() -> None:
    p = Published()
    subscriber = p.subscriber(min_version=2, multiple_of=3)
    assert versions(subscriber) == []
    p.steps(5)
    assert versions(subscriber) == [3]
    assert p.choose(subscriber, 6) is None  # it will come: another server has it already
    with pytest.raises(Busy, match="version 5 of epoch 0 is not retained"):
        p.choose(subscriber, 5)
    p.steps(1)
    assert p.choose(subscriber, 6) is not None


def test_what_is_past_is_gone() -> None:
    p = Published()
    p.steps(3)
    subscriber = p.subscriber()
    with pytest.raises(Busy, match="take a newer one"):
        p.choose(subscriber, 2)
    chosen = p.choose(subscriber, 3)
    p.publications.remove(subscriber)
    assert len(p.publications) == 0
    assert chosen is not None
    with pytest.raises(Busy, match="retained no longer"):
        chosen.frames_since(0, -1, changes=False)


def test_the_oldest_gives_way_first_what_is_only_compared_with() -> None:
    p = Published(max_bytes=2.5 * BYTES)
    slow, comparing = p.subscriber(), p.subscriber()
    p.choose(comparing, 0)
    p.publications.done(comparing, compare=True)
    slow_version = p.choose(slow, 0)
    p.reserve(comparing, min_version=1)
    p.steps(1)
    assert comparing.base is not None
    p.steps(1)
    assert versions(comparing) == [1, 2] or versions(comparing) == [2]
    assert p.publications.nbytes <= 2.5 * BYTES
    assert slow_version is not None
    assert slow_version.dropped
    assert p.counters["published_dropped"] >= 1


def test_one_version_is_retained_however_small_the_limit() -> None:
    p = Published(max_bytes=0)
    subscriber = p.subscriber()
    p.steps(2)
    assert versions(subscriber) == [2]
    assert p.choose(subscriber, 2) is not None


def test_a_subscriber_that_does_not_take_its_version_loses_it() -> None:
    p = Published(retain_s=10.0)
    slow, live = p.subscriber(), p.subscriber()
    chosen = p.choose(slow, 0)
    p.now_s = 10.5
    p.reserve(live, min_version=1)
    p.steps(1)
    assert chosen is not None
    assert chosen.dropped
    assert versions(live) == [1]


def test_after_a_restore_nothing_of_before_is_served() -> None:
    p = Published()
    subscriber = p.subscriber()
    old = subscriber.reserved[0]
    p.publications.clear()
    assert old.dropped
    p.publish(epoch=1)
    assert [publication.key[0] for publication in subscriber.reserved] == [1]
    assert Wish(dtype=DType.F32, epoch=1, min_version=7).wants(2, 3)
    assert not Wish(dtype=DType.F32, epoch=1).wants(0, 3)


def test_slices_that_came_later_are_in_it_too() -> None:
    servers = Servers(SPEC, 2, optimizer=one_group(LAYOUT, lr=0.1))
    servers.upload([np.ones(u.numel, np.float32) for u in LAYOUT.units])
    first, second = (engine.slices.primaries for engine in servers.engines)
    publication = Publication((0, 0, DType.F32))
    assert publication.add(first, shared=True) == []
    assert publication.complete
    lacking = publication.add([*first, *second], shared=False)
    assert lacking == second
    assert not publication.complete
    for owned in lacking:
        publication.encode(owned)
    assert publication.complete
