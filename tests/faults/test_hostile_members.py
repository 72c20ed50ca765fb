"""What a careless or hostile member can cost a job, over real processes: it is refused by name, and the job goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from axon_ps import errors
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.coordinator.core import admission, kv, records
from axon_ps.rpc import limits
from axon_ps.rpc.channels import connect
from axon_ps.rpc.service import Stub
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.storage.state_store import open_state
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import results_of
from axon_ps.types import DType, Membership, ModelProgress, Role
from axon_ps.wire.events import Status
from axon_ps.wire.v1 import common_pb2, shard_pb2
from deadlines import HANG_S

T = TypeVar("T")
SHARD = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
HUGE = JobSpec(layout=Layout(units=(build_unit("huge", [("huge", (1 << 20, 1 << 20), DType.F32)]),)))
"""2^40 parameters: 12 TiB with their gradients and frames."""


class Member(CoordinatorClient):
    """A worker that joins by hand."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.events: list[Any] = []
        super().__init__(
            cluster.address,
            job=cluster.job,
            role=Role.WORKER,
            node="here",
            security=cluster.security,
            on_event=self.events.append,
        )


def as_member(cluster: LocalCluster, act: Callable[[Member], Awaitable[T]]) -> T:
    """Join, do something, and leave."""

    async def run() -> T:
        member = Member(cluster)
        await member.start(20.0)
        try:
            return await act(member)
        finally:
            await member.close()

    return asyncio.run(run())


def as_operator(cluster: LocalCluster, act: Callable[[OperatorClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with OperatorClient(cluster.address, security=cluster.security, job=cluster.job) as operator:
            return await act(operator)

    return asyncio.run(run())


def status_of(cluster: LocalCluster) -> Status:
    return as_operator(cluster, lambda operator: operator.status())


def train(name: str, steps: int, until: Path | None = None) -> int:
    """Train a small model for some steps, and on until a file is there if one is named; returns its version."""
    import torch
    from torch import nn

    from axon_ps import parallel
    from axon_ps.worker.world import World

    with World.init(timeout_s=HANG_S) as world:
        model = parallel.FSDP(nn.Linear(8, 8), world.default_group, name=name)
        optimizer = parallel.SGD(model, lr=0.1)
        last = model.version + steps
        # a step that somebody's coming or going has aborted is made again
        while model.version < last or (until is not None and not until.exists()):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(model.version)


def trained(cluster: LocalCluster, name: str = "small", steps: int = 2) -> int:
    """A worker process trains in a job; returns the version reached."""
    (result,) = cluster.run_workers(train, n=1, args=(name, steps))
    return int(result.value)


# ---------------------------------------------------------------------- attack 3: a layout that nobody can hold


def test_a_layout_of_2_40_parameters_is_refused_with_the_figures_and_the_jobs_go_on() -> None:
    async def poison(member: Member) -> str:
        with pytest.raises(errors.Busy) as refused:
            await member.register(spec=HUGE, name="huge")
        return str(refused.value)

    with (
        LocalCluster(shards=2, world_size=1, min_workers=1, durable=True) as cluster,
        LocalCluster(shards=1, world_size=1, job="other") as other,
    ):
        assert trained(cluster) == 2
        message = as_member(cluster, poison)
        assert "shard server 0 would need" in message
        assert "TiB beside the" in message
        assert "can have" in message
        assert "start more shard servers" in message
        assert [m.name for m in status_of(cluster).models] == ["small"]
        assert trained(cluster) == 4, "another model of the same job goes on"
        assert trained(other) == 2, "and another job"
        cluster.kill("coordinator")
        cluster.restart("coordinator")
        assert trained(cluster) == 6
        for index in range(2):
            assert cluster.process(Role.SHARD, index).exit_code is None
        assert not any("held" in what for what in status_of(cluster).pending)


def poisoned(path: Path) -> None:
    """The durable state that a coordinator of before this check has, of a job with such a model."""
    state = records.ParameterState(placement=new_placement(HUGE.plan(1), [Server(0)], 1))
    nobody = Membership(
        generation=1, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False, waiting_for="members"
    )
    members = records.members_record(nobody, was_complete=True, vacant=0, draining=(), needed_shards=1)
    with open_state(str(path), "test") as store:
        store.apply(
            [
                records.job_record(uuid.uuid4().hex, "test", 1, 1),
                members,
                records.models_record({0: "huge"}, 1),
                records.progress_record(ModelProgress(model=0, step=1, version=0)),
                records.spec_record(0, HUGE),
                records.parameters_record(0, state),
            ]
        )


def test_a_coordinator_with_a_poisoned_state_comes_up_says_so_and_the_model_can_be_released(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    poisoned(path)
    with LocalCluster(shards=1, world_size=1, min_workers=1, state=str(path)) as cluster:

        async def told(operator: OperatorClient) -> str:
            async with asyncio.timeout(20.0):
                while not (found := [p for p in (await operator.status()).pending if "is not held" in p]):
                    await operator.kv_get("anything")
            return found[0]

        message = as_operator(cluster, told)
        assert "model 'huge' is not held: shard server 0 cannot hold it" in message
        assert "axon-ps release 'huge'" in message
        assert trained(cluster) == 2, "other models go on"
        as_operator(cluster, lambda operator: operator.release(0, "huge"))
        assert not any("held" in what for what in status_of(cluster).pending)
        assert trained(cluster) == 4
        assert cluster.process(Role.SHARD, 0).exit_code is None


# ---------------------------------------------------------------------- attack 5: places that a caller names


HOSTILE_URIS = {
    "http": "http://127.0.0.1:1/x",
    "ftp": "ftp://127.0.0.1/x",
    "chain": "simplecache::http://127.0.0.1:1/x",
    "chain of allowed ones": "simplecache::file:///tmp",
    "another scheme": "github://a:b@c",
    "outside": "/etc",
    "out by dots": "{root}/../outside",
    "out by a link": "{root}/link/x",
    "a file URI": "file:///etc",
    "memory": "memory://x",
}


def test_checkpoints_are_only_where_the_coordinator_may_open_them(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    environment = {"AXON_PS_CHECKPOINT_ROOTS": str(root)}
    with LocalCluster(shards=1, world_size=1, min_workers=1, environment=environment) as cluster:
        assert trained(cluster) == 2
        for template in HOSTILE_URIS.values():
            uri = template.format(root=root)

            async def refused(operator: OperatorClient, uri: str = uri) -> None:
                for call in (operator.save_checkpoint(uri), operator.restore_checkpoint(uri)):
                    with pytest.raises(errors.ConfigurationError, match="is not opened: .*AXON_PS_CHECKPOINT_ROOTS"):
                        await call

            as_operator(cluster, refused)
        assert not list(outside.iterdir())
        assert trained(cluster) == 4, "the job goes on"
        as_operator(cluster, lambda operator: operator.save_checkpoint(str(root / "run")))
        as_operator(cluster, lambda operator: operator.restore_checkpoint(str(root / "run")))
        assert trained(cluster) == 6


def test_who_says_who_it_is_and_is_no_member_saves_and_restores_nothing(tmp_path: Path) -> None:
    class Stranger(OperatorClient):
        """A caller with an incarnation that is not in the job."""

        retries = False

        def context(self) -> common_pb2.CallContext:
            return common_pb2.CallContext(job="test", incarnation=uuid.uuid4().hex)

    async def strange(cluster: LocalCluster) -> None:
        async with Stranger(cluster.address, security=cluster.security, job=cluster.job) as stranger:
            for call in (
                stranger.save_checkpoint(str(tmp_path / "run")),
                stranger.restore_checkpoint(str(tmp_path / "run")),
                stranger.release(0, "model 0"),
                stranger.drain(0),
            ):
                with pytest.raises(errors.GenerationChanged, match="is no member of generation"):
                    await call

    with LocalCluster(shards=1, world_size=1, min_workers=1) as cluster:
        assert trained(cluster) == 2
        asyncio.run(strange(cluster))
        assert not list(tmp_path.iterdir())
        assert trained(cluster) == 4


def test_a_checkpoint_that_is_signed_with_another_key_is_not_loaded_and_the_job_goes_on(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    run = str(tmp_path / "run")

    def keyed(name: str) -> LocalCluster:
        key = {"AXON_PS_CHECKPOINT_KEY_FILE": str(tmp_path / name)}
        return LocalCluster(shards=2, world_size=1, min_workers=1, environment=key)

    with keyed("ours") as cluster:
        assert trained(cluster) == 2
        as_operator(cluster, lambda operator: operator.save_checkpoint(run))
    with keyed("ours") as cluster:  # a later run, with another token
        assert trained(cluster, steps=1) == 1
        as_operator(cluster, lambda operator: operator.restore_checkpoint(run))
        assert trained(cluster, steps=1) == 3
    with keyed("theirs") as cluster:
        assert trained(cluster) == 2

        async def refused(operator: OperatorClient) -> None:
            with pytest.raises(errors.CheckpointError, match="is signed with another key than this job's"):
                await operator.restore_checkpoint(run)

        as_operator(cluster, refused)
        assert trained(cluster) == 4, "nothing was loaded"
    verify = [sys.executable, "-m", "axon_ps.cli.main", "checkpoint", "verify", run, "--checkpoint-key-file"]
    for name, code, words in (("ours", 0, "signed with the key of"), ("theirs", 1, "signed with another key")):
        done = subprocess.run([*verify, str(tmp_path / name)], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert words in done.stdout + done.stderr


# ---------------------------------------------------------------------- attack 4: stopping a job


async def refuse(calls: list[Awaitable[Any]], count: int, error: type[Exception], words: str) -> None:
    """So many of many calls are refused at once, with these words; the others wait, and are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        async with asyncio.timeout(60.0):
            while sum(task.done() for task in tasks) < count:
                await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        found = [task.exception() for task in tasks if task.done()]
        assert len(found) == count
        assert all(isinstance(e, error) and words in str(e) for e in found), found[:3]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_waits_of_one_member_are_bounded_and_the_others_go_on() -> None:
    with LocalCluster(shards=1, world_size=1, min_workers=1) as cluster:

        async def attack(member: Member) -> None:
            barriers = [member.barrier(f"b{i}", ranks=(member.rank, 4000), timeout_s=1e9) for i in range(1000)]
            words = "256 calls of this process wait for barriers already, which is the most of one"
            await refuse(barriers, 1000 - 256, errors.Busy, words)
            waits = [member.kv_wait(f"k{i}", timeout_s=1e9) for i in range(1000)]
            words = "256 calls of this process wait for keys already, which is the most of one"
            await refuse(waits, 1000 - 256, errors.Busy, words)
            assert await member.kv_add("others", 1) == 1

        assert trained(cluster) == 2
        as_member(cluster, attack)
        assert trained(cluster) == 4


def test_the_store_is_bounded_and_gives_its_space_back(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"

    def size_bytes() -> int:
        return sum(p.stat().st_size for p in tmp_path.iterdir())

    with LocalCluster(shards=1, world_size=1, min_workers=1, state=str(path)) as cluster:

        async def fill(member: Member) -> int:
            stored = 0
            with pytest.raises(errors.Busy, match=f"of {kv.MAX_TOTAL_BYTES} bytes, which is the most of a job"):
                for stored in range(256):
                    await member.kv_put(f"k{stored}", bytes(1 << 20))
            return stored

        async def empty(member: Member) -> None:
            for i in range(64):
                await member.kv_delete(f"k{i}")

        assert as_member(cluster, fill) == 63
        assert size_bytes() > 60 << 20
        assert trained(cluster) == 2, "a full store stops no step"
        as_member(cluster, empty)
        assert trained(cluster, steps=20) == 22
        assert size_bytes() < 12 << 20, "its journal included"


def test_half_open_gathers_and_health_watches_are_refused() -> None:
    with LocalCluster(shards=1, world_size=1, min_workers=1) as cluster:

        async def gathers(member: Member) -> None:
            context = member.context()
            context.generation = 1 << 62
            channel = connect(cluster.address_of(Role.SHARD), cluster.security)
            stub = Stub(channel, SHARD, cluster.security)

            async def gather() -> None:
                stream = stub.open("AllGather")
                await stream.write(shard_pb2.AllGatherRequest(context=context, begin=0, end=1))
                await stream.read()

            words = f"generation {1 << 62} is none of this job's"
            await refuse([gather() for _ in range(600)], 600, errors.InvalidRequest, words)
            await channel.close()

        async def watches(address: str) -> int:
            """How many of 300 health watches, without a token, stay open."""
            async with grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                calls = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(300)]
                replies = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
                full = [r for r in replies if isinstance(r, grpc.aio.AioRpcError)]
                assert all(r.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for r in full)
                for call in calls:
                    call.cancel()
                return len(replies) - len(full)

        assert trained(cluster) == 2
        as_member(cluster, gathers)
        for address in (cluster.address, cluster.address_of(Role.SHARD)):
            assert asyncio.run(watches(address)) == limits.MAX_WATCHES
        assert trained(cluster) == 4


def test_workers_that_join_and_leave_are_made_to_wait_and_the_job_trains_on(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=1, min_workers=1) as cluster:
        trainer = cluster.start_workers(train, args=("small", 2, tmp_path / "enough"))[0]
        while status_of(cluster).version < 2:
            pass

        async def come_and_go() -> str:
            for _ in range(200):
                member = Member(cluster)
                try:
                    await member.start(2.0)
                except errors.AxonError as error:
                    return str(error)
                finally:
                    await member.close()
            return ""

        assert f"{admission.MAX_OF_NODE} workers of node here have joined and left within 60 s" in asyncio.run(
            come_and_go()
        )
        refused_at = status_of(cluster).version
        while status_of(cluster).version < refused_at + 100:
            pass
        (tmp_path / "enough").touch()
        results_of([trainer], timeout_s=HANG_S, check=True)
