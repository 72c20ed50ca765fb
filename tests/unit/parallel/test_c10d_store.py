"""torch.distributed's store over the coordinator's, in a job of this process. The oracle is torch's own HashStore.

Tests of `parallel/c10d/store.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from axon_ps import World
from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.parallel.c10d.store import KVStore

LONG_S = 20.0


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("text"),
        lambda store: store.add("number", 5),
        lambda store: store.add("number", -7),
        lambda store: (store.add("written", 2), store.get("written")),
        lambda store: store.add("new", 3),
        lambda store: (store.set("text", "other"), store.get("text")),
        lambda store: (store.set("number", "8"), store.add("number", 1)),
        lambda store: (store.set("empty", ""), store.get("empty"), store.check(["empty"])),
        lambda store: (store.append("text", "!"), store.get("text")),
        lambda store: (store.append("new", b"\0a"), store.append("new", "b"), store.get("new")),
        lambda store: (store.compare_set("text", "a text", "new"), store.get("text")),
        lambda store: (store.compare_set("text", "wrong", "new"), store.get("text")),
        lambda store: (store.compare_set("new", "", "first"), store.get("new")),
        lambda store: (store.compare_set("new", "wrong", "first"), store.check(["new"])),
        lambda store: (store.delete_key("text"), store.delete_key("text"), store.check(["text"])),
        lambda store: (store.check(["text", "number"]), store.check(["text", "new"]), store.check([])),
        lambda store: (store.multi_set(["a", "b"], ["1", "2"]), store.multi_get(["b", "a"])),
        lambda store: store.wait(["text", "number"], timedelta(seconds=LONG_S)),
    ],
)
def test_it_does_what_torchs_own_does(world: World, act: Callable[[Any], Any]) -> None:
    stores: list[Any] = [KVStore(world), HashStore()]
    results = []
    for store in stores:
        store.set("text", "a text")
        store.add("number", 1)
        store.set("written", "40")
        results.append((act(store), store.num_keys()))
    assert results[0] == results[1]


def test_torchs_own_wrapper_reaches_it_from_cpp(world: World) -> None:
    """C++ calls its methods by other names."""
    ours = KVStore(world)  # torch holds its C++ half alone
    store = PrefixStore("rank", ours)
    store.set("a", "1")
    assert store.add("n", 2) == 2
    assert store.get("a") == b"1"
    assert store.compare_set("a", "1", "2") == b"2"
    assert store.multi_get(["a", "n"]) == [b"2", b"2"]
    assert ours.get("rank/a") == b"2"
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_stores_of_other_prefixes_are_apart_and_clones_are_not(world: World) -> None:
    first, second = KVStore(world, "one"), KVStore(world, "two")
    first.set("key", b"\xff\0")
    assert not second.check(["key"])
    assert (first.num_keys(), second.num_keys()) == (1, 0)
    assert first.clone().get("key") == b"\xff\0"


def test_a_wait_ends_when_the_last_key_is_stored_or_in_time_with_the_key_that_lacks(world: World) -> None:
    store = KVStore(world)
    store.set("there", "")
    with pytest.raises(Timeout, match=r"nobody stored 'not' in the c10d store within 0\.0"):
        store.wait(["there", "not"], timedelta(seconds=0.01))
    store.set_timeout(timedelta(seconds=0.01))
    assert store.timeout == timedelta(seconds=0.01)
    for wait in (lambda: store.get("not"), lambda: store.wait(["not"])):
        with pytest.raises(Timeout, match="nobody stored 'not'"):
            wait()
    store.set_timeout(timedelta(seconds=LONG_S))
    other = threading.Thread(target=store.clone().set, args=("not", "now"))
    other.start()
    store.wait(["there", "not"])
    assert store.get("not") == b"now"
    other.join()


def test_what_cannot_be_is_refused(world: World) -> None:
    store = KVStore(world)
    store.set("text", "a text")
    with pytest.raises(InvalidRequest, match="key 'text' is b'a text', which is no integer; nothing can be added"):
        store.add("text", 1)
    with pytest.raises(InvalidRequest, match="multi_set was given 2 keys and 1 values; give as many"):
        store.multi_set(["a", "b"], ["1"])


def test_every_value_that_is_appended_by_threads_is_there(world: World) -> None:
    store = KVStore(world)
    threads = [threading.Thread(target=store.append, args=("all", f"{i},")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.get("all").decode().strip(",").split(",")) == [str(i) for i in range(8)]
    assert store.num_keys() == 1
