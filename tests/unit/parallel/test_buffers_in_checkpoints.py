"""Persistent buffers are in checkpoints, as rank 0 has them, and come back under every strategy and world size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from axon_ps import World
from axon_ps.coordinator.attachments import UNSAVED, Header
from axon_ps.errors import CheckpointCorrupt, InvalidRequest
from axon_ps.parallel import FSDP, SGD, MixedPrecision, ShardingStrategy
from axon_ps.parallel.checkpoints import buffers as buffers_module
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers, ServedBuffers
from axon_ps.storage.export import export_model
from axon_ps.storage.hf_directory import export_directory
from axon_ps.storage.manifest import MANIFEST_NAME, read_manifest
from axon_ps.testing import run_threads
from axon_ps.types import DType

State = dict[str, torch.Tensor]

LIMIT_S = 300.0
"""For a hang: compiled loops may be cold, and others busy."""

pytestmark = pytest.mark.timeout(600)


class Net(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.lin, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("flags", torch.full((3,), bool(fill)))
        self.register_buffer("small", torch.full((2,), int(fill), dtype=torch.int8))
        self.register_buffer("low", torch.full((2,), fill, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.full((2,), fill), persistent=False)
        for p in self.parameters():
            nn.init.constant_(p, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.lin(x))))  # type: ignore[no-any-return]


def rows(rank: int, step: int = 0) -> torch.Tensor:
    """Different ones on every rank, so their running statistics differ."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank)) * (rank + 1) + rank


def wrapped(module: nn.Module, strategy: ShardingStrategy, **options: Any) -> tuple[FSDP, SGD]:
    model = FSDP(module, sharding_strategy=strategy, unit_types={nn.Linear}, name="m", **options)
    return model, SGD(model.parameters(), lr=0.1)


def train(model: FSDP, optimizer: SGD, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        model(rows(rank, step)).square().mean().backward()
        assert optimizer.step().committed
        optimizer.zero_grad()


def saved_in(directory: Path, world: World, strategy: ShardingStrategy) -> State:
    """Train and save; the state of rank 0."""
    model, optimizer = wrapped(Net(1.0), strategy)
    train(model, optimizer, world.rank)
    model.save_checkpoint(str(directory / strategy.name), optimizer)
    state = model.state_dict()
    if strategy is not ShardingStrategy.NO_SHARD:
        model.release()
    return state


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[ShardingStrategy, list[State]]]:
    """One of each strategy, and by strategy the state of every rank."""
    directory = tmp_path_factory.mktemp("checkpoints")
    ranks = run_threads(
        lambda world: {s: saved_in(directory, world, s) for s in ShardingStrategy}, 2, timeout_s=LIMIT_S
    )
    states = {s: [rank[s] for rank in ranks] for s in ShardingStrategy}
    for first, second in states.values():
        assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    return directory, states


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_strategy_restores_what_any_has_saved(checkpoints: Any, world_size: int) -> None:
    directory, states = checkpoints

    def worker(world: World) -> None:
        for strategy in ShardingStrategy:
            model, optimizer = wrapped(Net(), strategy)
            others = [s for s in ShardingStrategy if s is not strategy]
            for saved in ShardingStrategy if world_size == 1 else others[:1]:
                model.load_checkpoint(str(directory / saved.name), optimizer)
                state = model.state_dict()
                for name, value in states[saved][0].items():
                    assert state[name].dtype == value.dtype
                    torch.testing.assert_close(state[name], value, msg=f"{name}, {saved} to {strategy}")
                assert not model.module.cache.any(), "it is not persistent"
            train(model, optimizer, world.rank, steps=1)
            if strategy is not ShardingStrategy.NO_SHARD:
                model.release()

    run_threads(worker, world_size, timeout_s=LIMIT_S)


def test_buffers_in_another_dtype_are_saved_in_their_own(tmp_path: Path) -> None:
    def worker(world: World) -> None:
        low = MixedPrecision(buffer_dtype=torch.bfloat16)
        model, optimizer = wrapped(Net(2.0), ShardingStrategy.FULL_SHARD, mixed_precision=low)
        assert model.module.norm.running_mean.dtype == torch.bfloat16
        model.module.norm.running_mean.fill_(0.75)
        before = model.state_dict()
        model.save_checkpoint(str(tmp_path), optimizer)
        model.module.norm.reset_running_stats()
        model.load_checkpoint(str(tmp_path), optimizer)
        after = model.state_dict()
        assert after["norm.running_mean"].dtype == torch.float32
        assert all(torch.equal(after[name], value) for name, value in before.items())

    run_threads(worker, 1, timeout_s=LIMIT_S)


def test_what_restores_without_the_wrapper_reaches_the_next_forward_and_state_dict(
    checkpoints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory, states = checkpoints
    strategy = ShardingStrategy.FULL_SHARD
    want = states[strategy][0]["norm.running_mean"]

    def worker(world: World) -> None:
        model, _ = wrapped(Net(), strategy)
        for read in (lambda: model.eval()(rows(0)), model.state_dict, model.module.state_dict):
            model.module.norm.reset_running_stats()
            epoch = world.models.only().view.epoch
            world.barrier()
            if world.rank == 1:
                world.restore_checkpoint(str(directory / strategy.name))
            world.models.only().view.wait_epoch(epoch + 1)
            read()
            assert torch.equal(model.module.norm.running_mean, want)
            world.barrier()
        given = {name: value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(given)
        assert torch.equal(model.state_dict()["norm.running_mean"], want + 1), "load_state_dict is no restore"

    run_threads(worker, 2, timeout_s=LIMIT_S)
    assert not [r for r in caplog.records if r.name == buffers_module.__name__]


def test_a_checkpoint_from_before_loads_and_says_once_that_it_has_none(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, states = checkpoints
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        there = tmp_path / strategy.name
        there.mkdir()
        manifest = json.loads((directory / strategy.name / MANIFEST_NAME).read_text())
        attached = {entry["name"] for entry in manifest.pop("attached").values()}
        assert manifest.pop("sha256")
        (there / MANIFEST_NAME).write_text(json.dumps(manifest))
        for path in (directory / strategy.name).iterdir():
            if path.name not in {MANIFEST_NAME, *attached}:
                (there / path.name).hardlink_to(path)

        def worker(world: World, strategy: Any = strategy, there: Path = there) -> None:
            model, optimizer = wrapped(Net(1.0), strategy)
            model.module.norm.running_mean.fill_(5.0)
            model.load_checkpoint(str(there), optimizer)
            assert bool((model.state_dict()["norm.running_mean"] == 5.0).all())
            assert torch.equal(model.state_dict()["lin.weight"], states[strategy][0]["lin.weight"])

        caplog.clear()
        run_threads(worker, 1, timeout_s=LIMIT_S)
        told = [r.getMessage() for r in caplog.records if r.name == buffers_module.__name__]
        assert len(told) == 1
        assert "has no buffers" in told[0]
        assert "'norm.running_mean'" in told[0]


def test_checkpoints_that_nobody_of_the_first_rank_orders_have_buffers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers_module, "CADENCE_S", 0.0)

    def worker(world: World) -> torch.Tensor:
        model, optimizer = wrapped(Net(), ShardingStrategy.FULL_SHARD)
        train(model, optimizer, world.rank)
        served = model._served_buffers
        assert served is not None
        assert (served._attaching is not None) == (world.rank == 0)
        if served._attaching is not None:
            served._attaching.result(LIMIT_S)
        world.barrier()
        if world.rank == 1:
            world.save_checkpoint(str(tmp_path))
        world.barrier()
        return model.module.norm.running_mean.clone()  # type: ignore[no-any-return]

    first, second = run_threads(worker, 2, timeout_s=LIMIT_S)
    export_model(str(tmp_path), str(tmp_path / "model.safetensors"))
    exported = load_file(tmp_path / "model.safetensors")["norm.running_mean"]
    assert torch.equal(exported, first)
    assert not torch.equal(exported, second)


def test_exports_have_buffers_as_state_dicts_do(checkpoints: Any, tmp_path: Path) -> None:
    directory, states = checkpoints
    for strategy in ShardingStrategy:
        want = states[strategy][0]
        export_directory(str(directory / strategy.name), str(tmp_path))
        exported = load_file(tmp_path / "model.safetensors")
        assert exported.keys() == want.keys()
        for name, value in exported.items():
            assert value.dtype == want[name].dtype
            torch.testing.assert_close(value, want[name])
        export_directory(str(directory / strategy.name), str(tmp_path), DType.BF16, prefix="norm.")
        cast = load_file(tmp_path / "model.safetensors")
        assert cast.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
        assert cast["running_mean"].dtype == torch.bfloat16
        assert cast["num_batches_tracked"].dtype == torch.int64


def test_damage_is_found_before_anything_is_changed(checkpoints: Any, tmp_path: Path) -> None:
    directory, _ = checkpoints
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        there = tmp_path / strategy.name
        there.mkdir()
        for path in (directory / strategy.name).iterdir():
            (there / path.name).write_bytes(path.read_bytes())
        (entry,) = read_manifest(str(there)).attached.values()
        content = bytearray((there / entry.name).read_bytes())
        content[-1] ^= 1
        (there / entry.name).write_bytes(content)

        def worker(world: World, strategy: Any = strategy, there: Path = there) -> None:
            model, optimizer = wrapped(Net(1.0), strategy)
            before = model.state_dict()
            with pytest.raises(CheckpointCorrupt, match="was altered"):
                model.load_checkpoint(str(there), optimizer)
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

        run_threads(worker, 1, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------- one worker's part


def test_shapes_names_and_damage_are_told() -> None:
    content = ModuleBuffers(Net(1.0), {}).encoded()
    assert content is not None
    other = Net()
    other.low = torch.zeros(3)
    with pytest.raises(InvalidRequest, match=r"buffer 'low' has shape \[2\] in it and \[3\] in the model"):
        ModuleBuffers(other, {}).load(content, "it")
    assert not other.flags.any(), "nothing was changed"  # type: ignore[operator, union-attr]
    with pytest.raises(CheckpointCorrupt, match="the buffers of it are damaged"):
        ModuleBuffers(Net(), {}).load(b"no safetensors", "it")
    assert ModuleBuffers(nn.Linear(1, 1), {}).encoded() is None


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("latest", [(0, 0), (0, 7)])
def test_all_but_the_one_that_gave_them_take_what_is_there(latest: tuple[int, int], given: bool) -> None:
    theirs = ModuleBuffers(Net(1.0), {})
    content = {
        key: theirs.encoded(persistent=not key.startswith(UNSAVED)) for key in ("buffers/m", "unsaved/buffers/m")
    }
    attached = SimpleNamespace(
        register=lambda key, source: None,
        header=lambda key: Header(blocks=1, sha256="theirs"),
        read=content.__getitem__,
    )
    world: Any = SimpleNamespace(attachments=attached, is_main_process=False)
    view: Any = SimpleNamespace(latest=latest, epoch=latest[0])
    module = Net()
    served = ServedBuffers(world, "m", ModuleBuffers(module, {}))
    served.prepare()
    differ = served.begin(view, given=given)
    assert bool(module.flags.all()) == bool(module.cache.all()) == (not given)  # type: ignore[operator, union-attr]
    expected = ["flags", "small", "low", "cache"] if latest == (0, 0) else ["cache"]
    assert differ == ([] if given else expected), "those of a job that has trained differ by nature"
