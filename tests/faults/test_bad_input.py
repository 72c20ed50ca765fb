"""What a user gets for a mistake: a table of (what was done, which error, which words), over real processes.

Each row either fails before anything happened or leaves the job as it was; the fixture in tests/conftest.py checks that
no process, port, file or shared-memory segment is left behind. Ctrl-C, ports in use and dying workers of `axon-ps run`
are in tests/e2e/test_cli_run.py, files of a checkpoint that are damaged one by one in tests/unit/storage.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axon_ps import errors, parallel
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import list_checkpoints, read_manifest, write_manifest
from axon_ps.testing import LocalCluster
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2
from axon_ps.worker.environment import WorkerConfig
from axon_ps.worker.world import World
from deadlines import HANG_S

SHARD = shard_pb2.DESCRIPTOR.services_by_name["Shard"]
NUMEL = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One job with one worker, this process; each test joins it anew."""
    with LocalCluster(shards=2, world_size=1, min_workers=1) as running:
        yield running


def config(cluster: LocalCluster) -> WorkerConfig:
    return WorkerConfig(coordinator=cluster.address, job=cluster.job, world_size=1, security=cluster.security)


class Sum(nn.Module):
    """The sum of its weights times the input."""

    def __init__(self, numel: int = NUMEL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def wrapped(world: World, numel: int = NUMEL) -> tuple[parallel.FSDP, parallel.SGD]:
    options = PlanOptions(chunk_numel=64, min_slice_numel=64)
    model = parallel.FSDP(Sum(numel), world.default_group, plan_options=options)
    return model, parallel.SGD(model, lr=0.5)


# ---------------------------------------------------------------------- joining


@dataclass(frozen=True)
class Refused:
    """A way to join that fails.

    Attributes:
        change: of the configuration that would work.
        error: what `World.init` raises.
        words: what its message says.
    """

    change: Callable[[WorkerConfig], WorkerConfig]
    error: type[Exception]
    words: str


JOINS = {
    "unreachable coordinator": Refused(
        lambda c: replace(c, coordinator="127.0.0.1:1"), errors.Unreachable, r"127\.0\.0\.1:1"
    ),
    "wrong token": Refused(lambda c: replace(c, security=Security(token="wrong")), errors.PermissionDenied, "token"),
    "no token": Refused(lambda c: replace(c, security=Security()), errors.PermissionDenied, "token"),
    "wrong job": Refused(lambda c: replace(c, job="other"), errors.PermissionDenied, "'other'"),
    "TLS to a plaintext server": Refused(
        lambda c: replace(c, security=Security(token=c.security.token, ca_file=os.environ["AXON_TEST_CA"])),
        errors.PermissionDenied,
        "the server speaks plaintext",
    ),
    "certificate that is not there": Refused(
        lambda c: replace(c, security=Security(ca_file="/nowhere/ca.pem")), errors.ConfigurationError, "/nowhere/ca.pem"
    ),
    "malformed address": Refused(
        lambda c: replace(c, coordinator="nowhere"), errors.ConfigurationError, "'nowhere' is not host:port"
    ),
}


@pytest.mark.parametrize("case", JOINS.values(), ids=JOINS.keys())
def test_joining_fails_with(
    case: Refused, cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trustme

    authority = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    monkeypatch.setenv("AXON_TEST_CA", str(authority))
    with pytest.raises(case.error, match=case.words):
        World.init(case.change(config(cluster)), join_timeout_s=2.0)


def test_missing_members_are_counted() -> None:
    with LocalCluster(shards=1, world_size=2) as running, pytest.raises(errors.Timeout, match="1 of 2 workers"):
        World.init(replace(config(running), world_size=2), join_timeout_s=1.0)


# ---------------------------------------------------------------------- layouts


def mismatched(numel_of_rank: dict[int, int], late: int) -> str:
    with World.init(timeout_s=HANG_S) as world:
        message = ""
        if world.rank == late:
            world.kv_wait("others wrap", HANG_S)
        else:
            world.kv_put("others wrap", b"")
        try:
            wrapped(world, numel_of_rank[world.rank])
        except errors.LayoutMismatch as error:
            message = str(error)
        world.barrier("all are told")  # one that was refused stays, and holds nobody up
        return message


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_layout_that_differs_from_that_of_rank_0_is_refused_there_by_name(odd: int, late: int) -> None:
    numels = {rank: 301 if rank == odd else 300 for rank in range(3)}
    with LocalCluster(shards=1, world_size=3) as running:
        results = running.run_workers(mismatched, args=(numels, late))
    for rank, result in enumerate(results):
        if numels[rank] == numels[0]:
            assert not result.value
        else:
            shapes = f"parameter 'weight' has shape ({numels[rank]},) here and ({numels[0]},) in the job"
            assert f"worker {rank} registers another model as 'model 0' than the job has from worker 0" in result.value
            assert shapes in result.value


# ---------------------------------------------------------------------- chunks


@dataclass(frozen=True)
class BadChunk:
    """A gradient chunk that a client must not send.

    Attributes:
        change: what is wrong with the header.
        payload: its bytes; None = those of a good chunk.
        error: what the server answers.
        words: what its message says.
    """

    change: dict[str, Any]
    error: type[Exception]
    words: str
    payload: bytes | None = None


CHUNKS = {
    "unit that does not exist": BadChunk({"unit": 9}, errors.InvalidRequest, "unit 9"),
    "offset beyond the slice": BadChunk({"offset": 640}, errors.InvalidRequest, "640"),
    "offset between chunks": BadChunk({"offset": 3}, errors.InvalidRequest, "3"),
    "too many elements": BadChunk({"numel": 65}, errors.InvalidRequest, "65", b"\0" * 260),
    "fewer bytes than elements": BadChunk({}, errors.InvalidRequest, "bytes", b"\0" * 100),
    "wrong dtype": BadChunk({"dtype": common_pb2.D_TYPE_BF16}, errors.InvalidRequest, "bf16", b"\0" * 128),
    "dtype of the future": BadChunk({"dtype": 99}, errors.InvalidRequest, "99"),
    "another's replica": BadChunk({"replica": 5}, errors.InvalidRequest, "replica"),
    "a step long gone": BadChunk({"step": 0}, errors.AxonError, "step"),
    "a generation long gone": BadChunk(
        {"context": {"generation": 0}}, errors.GenerationChanged, "generation 0 is over"
    ),
    "a stranger": BadChunk({"context": {"incarnation": "ab" * 16}}, errors.PermissionDenied, "not a worker"),
    "another job": BadChunk({"context": {"job": "other"}}, errors.PermissionDenied, "'other'"),
    "no chunk at all": BadChunk({}, errors.InvalidRequest, "message", b"\xff\xff\xff\xff"),
}


async def push(address: str, token: str, message: bytes) -> None:
    channel = connect(address, Security(token=token))
    try:
        stream = Stub(channel, SHARD, Security(token=token)).open("ReduceScatter", timeout_s=HANG_S)
        await stream.write(message)
        await stream.read()
    finally:
        await channel.close()


@pytest.mark.parametrize("case", CHUNKS.values(), ids=CHUNKS.keys())
def test_a_bad_chunk_is_refused_and_the_step_goes_on(case: BadChunk, cluster: LocalCluster) -> None:
    with World.init(config(cluster), timeout_s=HANG_S) as world:
        model, optimizer = wrapped(world)
        model(torch.ones(NUMEL)).backward()
        assert optimizer.step().committed  # so that step 0 is long gone
        optimizer.zero_grad()
        before = model.state_dict()["weight"]
        ticket = world.steps.ticket()
        values: dict[str, Any] = {
            "unit": 0,
            "offset": 0,
            "numel": 64,
            "end": 64,
            "dtype": common_pb2.D_TYPE_F32,
            "replica": 0,
            "step": ticket.step,
        }
        context = {"job": cluster.job, "generation": world.generation, "incarnation": world.steps.view.me.incarnation}
        context |= case.change.get("context", {})
        values |= {k: v for k, v in case.change.items() if k != "context"}
        header = common_pb2.Chunk(context=common_pb2.CallContext(**context), **values)
        payload = case.payload if case.payload is not None else np.ones(64, np.float32).tobytes()
        garbage = case.payload == b"\xff\xff\xff\xff"
        message = payload if garbage else encode_chunk(header, memoryview(payload))
        loop = world._loop
        with pytest.raises(case.error, match=case.words):
            loop.run(push(world.membership.shards[0].address, cluster.token, message), 10.0)
        model(torch.ones(NUMEL)).backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
        torch.testing.assert_close(model.state_dict()["weight"], before - 0.5)


def test_a_range_that_cannot_be_gathered_is_refused(cluster: LocalCluster) -> None:
    with World.init(config(cluster), timeout_s=HANG_S) as world:
        wrapped(world)
        out = np.empty(NUMEL, np.float32)
        for unit, begin, end, words in ((7, 0, None, "no unit 7"), (0, 200, 100, "not a range"), (0, 0, 999, "999")):
            with pytest.raises(errors.InvalidRequest, match=words):
                world.steps.parameters.gather(unit, out, begin=begin, end=end).wait()
        with pytest.raises(errors.InvalidRequest, match="needed is a contiguous"):
            world.steps.parameters.gather(0, out[:10]).wait()


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_step_and_nothing_else(bad: float, cluster: LocalCluster) -> None:
    with World.init(config(cluster), timeout_s=HANG_S) as world:
        model, optimizer = wrapped(world)
        before = model.state_dict()["weight"]
        x = torch.ones(NUMEL)
        x[17] = bad
        model(x).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        assert not result.committed
        assert "finite" in result.reason
        assert torch.equal(model.state_dict()["weight"], before)
        model(torch.ones(NUMEL)).backward()
        model.clip_grad_norm(1e9)
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.committed
        assert result.grad_norm == pytest.approx(NUMEL**0.5)
        torch.testing.assert_close(model.state_dict()["weight"], before - 0.5)


def disagree(what: str) -> str:
    with World.init(timeout_s=HANG_S) as world:
        model, optimizer = wrapped(world)
        model(torch.ones(NUMEL)).backward()
        if what == "lr" and world.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.25
        if what == "max_norm":
            model.clip_grad_norm(1.0 + world.rank)
        result = optimizer.step()
        assert not result.committed
        world.barrier("done")
        return result.reason


@pytest.mark.parametrize("what", ["lr", "max_norm"])
def test_workers_that_disagree_about_a_step_are_told_who_and_what(what: str) -> None:
    with LocalCluster(shards=1, world_size=2) as running:
        reasons = [r.value for r in running.run_workers(disagree, args=(what,))]
    for reason in reasons:
        assert what in reason
        assert "rank 1" in reason or "worker 1" in reason


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_that_is_not_there_truncated_or_of_another_model(cluster: LocalCluster, tmp_path: Path) -> None:
    with World.init(config(cluster), timeout_s=HANG_S) as world:
        model, _ = wrapped(world)
        before = model.state_dict()["weight"]
        with pytest.raises(errors.CheckpointNotFound, match="nowhere"):
            world.restore_checkpoint(str(tmp_path / "nowhere"))
        info = world.save_checkpoint(str(tmp_path / "one"), extra={"epoch": 3})
        file = next(Path(info.uri).glob("*.safetensors"))
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(errors.CheckpointCorrupt, match=file.name):
            world.restore_checkpoint(info.uri)
        assert torch.equal(model.state_dict()["weight"], before)
        file.write_bytes(content)
        assert world.restore_checkpoint(info.uri).extra == {"epoch": 3}
        assert torch.equal(model.state_dict()["weight"], before)
        with pytest.raises(errors.InvalidRequest, match="JSON"):
            world.save_checkpoint(str(tmp_path / "two"), extra={"epoch": object()})
        assert [p.name for p in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content[:-1] + bytes([content[-1] ^ 1])]
)
def test_a_restore_of_a_damaged_checkpoint_overwrites_nothing_on_servers_whose_files_are_right(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    def spoil(uri: str) -> str:
        first, *_ = sorted(Path(uri).glob("*.safetensors"))
        first.write_bytes(damage(first.read_bytes()))
        return first.name

    check_that_nothing_is_given_up(spoil, str(tmp_path / "one"))


@pytest.mark.parametrize("damage", ["updates below zero", "tensors that overlap", "no header"])
def test_a_restore_of_what_fits_its_hashes_alone_gives_up_nothing(damage: str, tmp_path: Path) -> None:
    """Somebody has put it together so: before, both servers ended at the next step, or had nothing to serve."""

    def spoil(uri: str) -> str:
        manifest = read_manifest(uri)
        files = [spoilt(Path(uri) / entry.name, damage) for entry in manifest.files]
        write_manifest(uri, replace(manifest, files=tuple(files)))
        return files[0].name

    check_that_nothing_is_given_up(spoil, str(tmp_path / "one"))


def check_that_nothing_is_given_up(spoil: Callable[[str], str], uri: str) -> None:
    """Restore a checkpoint that `spoil` has damaged, which returns the name of a file of it; the job trains on."""
    with LocalCluster(shards=2, world_size=1, replication=1) as running, World.init(config(running)) as world:
        model, optimizer = wrapped(world, numel=256)
        info = world.save_checkpoint(uri)
        model(torch.ones(256)).backward()
        assert optimizer.step().version == 1
        now = model.state_dict()["weight"]
        name = spoil(info.uri)
        with pytest.raises(errors.CheckpointCorrupt, match=name):
            world.restore_checkpoint(info.uri)
        assert torch.equal(model.state_dict()["weight"], now)
        optimizer.zero_grad()
        model(torch.ones(256)).backward()
        assert optimizer.step().version == 2


def spoilt(path: Path, damage: str) -> FileEntry:
    """Change a shard server's file; the entry of a manifest that says so."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    (updates,) = (name for name in header if name.endswith(".updates"))
    begin, end = header[updates]["data_offsets"]
    if damage == "updates below zero":
        data = data[:begin] + b"\xff" * (end - begin) + data[end:]
    elif damage == "tensors that overlap":
        header[updates]["data_offsets"] = [0, end - begin]
    text = b"[" * 100_000 if damage == "no header" else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(content)
    return FileEntry(name=path.name, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


@contextmanager
def tiny_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of that size, mounted for a while."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "axon-ps-test", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.tmpfs
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny tmpfs needs root")
def test_a_full_disk_is_said_so_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    def fill(world: World, disk: Path) -> None:
        for number in range(10):
            world.save_checkpoint(str(disk / f"more{number}"))

    with (
        LocalCluster(shards=2, world_size=1) as running,
        tiny_disk(tmp_path / "disk", 3 << 19) as disk,
        World.init(config(running), timeout_s=HANG_S) as world,
    ):
        model, _ = wrapped(world, numel=100_000)
        first = world.save_checkpoint(str(disk / "first"))  # 0.4 MiB of 1.5: a few more fit, not ten
        values = model.state_dict()["weight"]
        with pytest.raises(errors.StorageFull, match="space"):
            fill(world, disk)
        complete = [Path(c.uri) for c in list_checkpoints(str(disk))]
        assert sorted(complete) == sorted(p for p in disk.iterdir() if p.is_dir())
        assert not list(disk.rglob("*.tmp*"))
        world.restore_checkpoint(first.uri)
        assert torch.equal(model.state_dict()["weight"], values)


# ---------------------------------------------------------------------- order of calls


def test_calls_in_an_impossible_order(cluster: LocalCluster) -> None:
    world = World.init(config(cluster), timeout_s=HANG_S)
    model, optimizer = wrapped(world)
    parallel.AdamW(model)
    with pytest.raises(errors.Misuse, match="optimizer"):  # another has taken its place
        optimizer.step()
    with pytest.raises(errors.InvalidRequest, match="gather_json was given a set, which cannot be sent"):
        world.gather_json({1, 2})
    world.close()
    world.close()
    with pytest.raises(errors.Closed, match=r"World\.init"):
        world.barrier()
