"""`init_process_group("axon")` in every way it can begin and end, its store, its sub-groups, and a rank that dies.

Tests of `parallel/c10d/register.py`, `parallel/c10d/session.py` and `parallel/c10d/store.py`.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import axon_ps.parallel
from axon_ps.errors import AxonError, ConfigurationError, InvalidRequest, MemberLost, Timeout
from axon_ps.host.ports import free_ports
from axon_ps.parallel.c10d.process_group import AxonProcessGroup
from axon_ps.parallel.c10d.store import KVStore
from axon_ps.testing import LocalCluster
from deadlines import HANG_S

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def sum_of_ranks(group: Any = None) -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


# ---------------------------------------------------------------------- beginning and ending


def begin_in_every_way(ports: tuple[int, int, int]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    cluster = {name: os.environ.pop(name) for name in ("AXON_PS_COORDINATOR", "AXON_PS_TOKEN", "MASTER_PORT")}

    for attempt, port in zip(("embedded", "embedded again"), ports[:2], strict=True):
        os.environ["MASTER_PORT"] = str(port)  # as torchrun does it: no coordinator anywhere
        dist.init_process_group("axon")
        objects: list[Any] = [None] * 2
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        seen[attempt] = (sum_of_ranks(), objects, dist.get_backend(), axon_ps.World.current() is not None)
        dist.destroy_process_group()
        seen[f"after {attempt}"] = axon_ps.World.current() is None

    os.environ |= cluster  # as `axon-ps run` does it
    for attempt in ("joined", "joined again"):
        dist.init_process_group("axon", init_method="axon://", timeout=timedelta(seconds=30))
        seen[attempt] = sum_of_ranks()
        dist.destroy_process_group()
        seen[f"after {attempt}"] = axon_ps.World.current() is None

    rank = int(os.environ["RANK"])
    left = dist.TCPStore("127.0.0.1", ports[2], 2, is_master=not rank)
    left.set(str(rank), "")
    left.wait(["0", "1"])  # a world is of whoever is there: the other has left the one before, too

    with axon_ps.World.init() as world:
        dist.init_process_group("axon", init_method="axon://")
        same = default_group().group is world.default_group
        dist.destroy_process_group()
        world.barrier()  # it is the user's, and still there
        with pytest.raises(ConfigurationError, match=f"rank {1 - world.rank} of 2"):
            dist.init_process_group("axon", store=KVStore(world, "wrong"), rank=1 - world.rank, world_size=2)
        dist.init_process_group("gloo", init_method="axon://")  # gloo in our store, with a group of ours
        group = dist.new_group(backend="axon")
        seen["world of the user"] = (same, sum_of_ranks(), sum_of_ranks(group), type(group).__name__)
        dist.destroy_process_group()
        seen["store"] = use_the_store(KVStore(world, f"store-{world.rank}"))
    return seen


def use_the_store(store: KVStore) -> list[Any]:
    seen: list[Any] = []
    through_cpp: Store = PrefixStore("p", store)
    for view in (store, through_cpp):
        view.set("text", "value")
        view.set("empty", "")
        seen.append([view.get("text"), view.get("empty"), view.check(["text", "empty"]), view.check(["none"])])
        seen.append([view.add("count", 3), view.add("count", 4), view.get("count")])
        view.set("number", "10")
        seen.append([view.add("number", 1), view.get("number")])
        view.append("text", "s")  # type: ignore[attr-defined]
        seen.append([view.get("text"), view.multi_get(["text", "empty"])])
        seen.append([view.compare_set("new", "", "1"), view.compare_set("new", "2", "3")])
        seen.append([view.compare_set("new", "1", "3"), view.compare_set("absent", "x", "y")])
        seen.append([view.delete_key("new"), view.delete_key("new")])
        view.wait(["text", "count"], timedelta(seconds=1))
    with pytest.raises(Timeout, match="'never'"):
        store.wait(["never"], timedelta(milliseconds=20))
    with pytest.raises(InvalidRequest, match="no integer"):
        store.add("text", 1)
    seen.append([store.num_keys(), through_cpp.num_keys()])
    return seen


STORE_SAW = [
    [b"value", b"", True, False],
    [3, 7, b"7"],
    [11, b"11"],
    [b"values", [b"values", b""]],
    [b"1", b"1"],
    [b"3", b"x"],
    [True, False],
]


def test_it_begins_and_ends_in_every_way() -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        first = free_ports(3)
        results = cluster.run_workers(begin_in_every_way, args=((first, first + 1, first + 2),))
    for result in results:
        seen = result.value
        for attempt in ("embedded", "embedded again"):
            assert seen[attempt] == (1, [{"rank": 0}, {"rank": 1}], "axon", True)
            assert seen[f"after {attempt}"]
        assert (seen["joined"], seen["joined again"]) == (1, 1)
        assert seen["after joined"]
        assert seen["after joined again"]
        assert seen["world of the user"] == (True, 1, 1, "AxonProcessGroup")
        assert seen["store"] == [*STORE_SAW, *STORE_SAW, [8, 8]]


# ---------------------------------------------------------------------- groups and deaths


def use_groups_until_one_dies() -> dict[str, Any]:
    dist.init_process_group("axon")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen: dict[str, Any] = {}
    sent, received = torch.full((3,), float(rank)), torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    seen["ring"] = received.tolist()

    tensors = [torch.ones(2), torch.ones(3, 3) * rank, torch.ones((), dtype=torch.int64)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    seen["coalesced"] = [tensor.flatten()[0].item() for tensor in tensors]

    split = default_group().split_group([0, 1])
    seen["split"] = None if split is None else (split.rank(), split.size())
    if TORCH >= (2, 15):  # older ones split no group without a device
        parts = dist.split_group(split_ranks=[[0, 1], [2]])
        assert (parts.size(), sum_of_ranks(parts)) == ((2, 1) if rank < 2 else (1, 2))
    if hasattr(dist, "gather_single"):
        dist.gather_single(torch.tensor([float(rank)]), received if rank == 1 else None, dst=1)
        assert rank != 1 or received.tolist() == [0.0, 1.0, 2.0]
    pair = dist.new_group([2, 0])
    if rank in (0, 2):
        seen["pair"] = sum_of_ranks(pair)
        dist.destroy_process_group(pair)
    default_group().monitored_barrier(timedelta(seconds=20))
    assert isinstance(default_group(), AxonProcessGroup)

    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(MemberLost, match="rank 2"):
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    seen["seconds"] = time.monotonic() - begun
    with pytest.raises(MemberLost, match="rank 2"):
        dist.barrier()
    dist.destroy_process_group()
    return seen


def test_groups_work_and_a_dead_rank_ends_what_is_pending() -> None:
    with LocalCluster(shards=1, world_size=3, lease_s=HANG_S) as cluster:
        environment = {"MASTER_PORT": str(free_ports())}  # for torch's own store
        results = cluster.run_workers(use_groups_until_one_dies, env=environment, check=False)
    assert results[2].exit_code == -signal.SIGKILL
    for rank in (0, 1):
        assert not results[rank].error, results[rank].error
        seen = results[rank].value
        assert seen["ring"] == [float((rank - 1) % 3)] * 3
        assert seen["coalesced"] == [3.0, 3.0, 3]
        assert seen["split"] == (rank, 2)
        assert seen["seconds"] < HANG_S / 2  # long before its lease ends
    assert results[0].value["pair"] == 2


# ---------------------------------------------------------------------- objects


class Harmful:
    """What pickle would run."""

    def __reduce__(self) -> Any:
        return print, ("code of another rank ran",)


def send_objects(pickled: bool) -> dict[str, Any]:
    if pickled:
        os.environ["AXON_PS_ALLOW_PICKLE"] = "1"
    dist.init_process_group("axon", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    sent: list[Any] = [{"rank": rank, "shape": torch.Size([rank]), "t": torch.full((2,), rank, dtype=torch.bfloat16)}]
    received: list[Any] = [None, None]
    dist.all_gather_object(received, sent[0])
    seen["gathered"] = [value["t"].tolist() for value in received]
    dist.broadcast_object_list(sent, src=1)
    seen["broadcast"] = sent[0]["rank"]
    try:
        dist.all_gather_object(received, Harmful() if rank == 0 else 1)
        seen["refused"] = ""
    except AxonError as error:
        seen["refused"] = str(error)
    seen["goes on"] = sum_of_ranks()
    if not pickled and rank == 0:  # a rank that is not ours to trust: it sends what torch would have sent
        dist.send(torch.tensor([len(PICKLED)]), 1)
        dist.send(torch.frombuffer(bytearray(PICKLED), dtype=torch.uint8), 1)
    elif not pickled:
        try:
            dist.recv_object_list([None], 0)
        except InvalidRequest as error:
            seen["pickle"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return seen


PICKLED = pickle.dumps(Harmful())


@pytest.mark.parametrize("pickled", [False, True], ids=["by default", "when asked for"])
def test_objects_are_pickled_only_when_that_is_asked_for(pickled: bool) -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        results = cluster.run_workers(send_objects, args=(pickled,), env={"MASTER_PORT": str(free_ports())})
    seen = [result.value for result in results]
    for one in seen:
        assert (one["gathered"], one["broadcast"], one["goes on"]) == ([[0, 0], [1, 1]], 1, 1)
        assert ("Harmful, which cannot be sent" in one["refused"]) is not pickled
    assert ("all_gather_object was given a " in seen[0]["refused"]) is not pickled
    assert ("AXON_PS_ALLOW_PICKLE=1" in seen[1].get("pickle", "")) is not pickled
    assert pickled == any("code of another rank ran" in result.output for result in results)
