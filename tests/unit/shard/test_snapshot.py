"""Checkpoints of slices: resharding to any server count and other units, and snapshots that let training go on."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import Busy, CheckpointCorrupt, CheckpointError, Closed, InvalidRequest, Misuse
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.apply import ApplyPool, VersionPins
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.export import export_model
from axon_ps.storage.manifest import Manifest, read_manifest, write_manifest
from axon_ps.types import Array, DType, OptimizerSpec
from engine_driver import Servers, commit_of, job_of, layout_of, one_group


def save(servers: Servers, uri: str, optimizer: OptimizerSpec | None) -> None:
    """What shard servers and coordinator do together."""
    count = len(servers.engines)
    files = []
    for rank, engine in enumerate(servers.engines):
        pins = VersionPins()
        files.append(snapshot.write(engine, uri, servers.version, rank, count, pins, pins.pin(servers.version)))
    manifest = Manifest(
        job="j",
        version=servers.version,
        layout=servers.spec.layout,
        optimizer=optimizer,
        num_servers=count,
        options=servers.spec.options,
        files=tuple(files),
    )
    write_manifest(uri, manifest)


def restore(engine: ShardEngine, uri: str, version: int) -> None:
    engine.parameters.begin_restore()
    prepared = snapshot.prepare(engine, uri, version)
    engine.parameters.withdraw()
    snapshot.load(engine, prepared)
    engine.restored(version, prepared.optimizer)


def restored(spec_servers: Servers, uri: str, version: int) -> Servers:
    for engine in spec_servers.engines:
        restore(engine, uri, version)
        assert engine.parameters.initialized
    return spec_servers


def by_name(servers: Servers) -> dict[str, Array]:
    """Every parameter as it would be gathered."""
    return {
        p.name: servers.values(u)[p.offset : p.end]
        for u, unit in enumerate(servers.spec.layout.units)
        for p in unit.parameters
    }


NUMELS = {"a": 100, "b": 7, "c": 130, "d": 1, "e": 64, "f": 50}


def layout(*units: str, frozen: Sequence[int] = ()) -> Layout:
    """Units from names: layout("ab", "c") has a and b in the first."""
    return Layout(
        units=tuple(
            build_unit(f"unit-{names}", [(n, (NUMELS[n],), DType.F32) for n in names], trainable=i not in frozen)
            for i, names in enumerate(units)
        )
    )


def optimizer_of(made: Layout, name: str = "adamw") -> OptimizerSpec:
    """Two groups: vowels and consonants."""
    groups = ({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0})
    return OptimizerSpec(
        name=name, groups=groups, group_of=tuple(0 if p.name in "ae" else 1 for _, p in made.parameters())
    )


def step(servers: Servers, number: int, skip: str = "") -> None:
    """A step whose gradients depend on names alone, so that it is the same under any layout."""
    for u, unit in enumerate(servers.spec.layout.units):
        if unit.trainable:
            absent = any(p.name in skip for p in unit.parameters)
            grads = [
                np.random.default_rng([number, ord(p.name)]).standard_normal(p.numel).astype(np.float32)
                for p in unit.parameters
            ]
            servers.push(u, 0, None if absent else np.concatenate(grads))
    servers.commit()


def made(units: Layout, num_servers: int, **options: int) -> Servers:
    return Servers(job_of(units, **options), num_servers, optimizer=optimizer_of(units))


def first_values(units: Layout) -> list[Array]:
    return [
        np.concatenate(
            [np.random.default_rng(ord(p.name)).standard_normal(p.numel).astype(np.float32) for p in unit.parameters]
        )
        for unit in units.units
    ]


@pytest.mark.parametrize("source", [1, 2, 3, 5])
@pytest.mark.parametrize("target", [1, 2, 4])
@pytest.mark.parametrize("units", [("ab", "cd", "e", "f"), ("abcdef",), ("f", "ea", "dcb")])
def test_any_server_count_and_any_units(tmp_path: Path, source: int, target: int, units: tuple[str, ...]) -> None:
    """Training goes on with the same bits: parameters, moments and update counts all came along."""
    old = layout("ab", "cd", "e", "f")
    servers = made(old, source, chunk_numel=32)
    servers.upload(first_values(old))
    for number in range(3):
        step(servers, number, skip="e" if number == 1 else "")  # "e" has one update less than the others
    save(servers, str(tmp_path), optimizer_of(old))

    new = restored(made(layout(*units), target, chunk_numel=48), str(tmp_path), 3)
    assert new.version == 3
    before, after = by_name(servers), by_name(new)
    assert all(after[n].tobytes() == before[n].tobytes() for n in NUMELS)
    for number in range(3, 5):
        step(servers, number)
        step(new, number)
    before, after = by_name(servers), by_name(new)
    assert all(after[n].tobytes() == before[n].tobytes() for n in NUMELS)


def test_through_an_object_store() -> None:
    uri = f"memory://{uuid.uuid4().hex}/checkpoint"
    old = layout("ab", "c")
    servers = made(old, 2)
    servers.upload(first_values(old))
    step(servers, 0)
    save(servers, uri, optimizer_of(old))
    new = restored(made(layout("a", "bc"), 3), uri, 1)
    assert {n: v.tobytes() for n, v in by_name(new).items()} == {n: v.tobytes() for n, v in by_name(servers).items()}


def test_the_optimizer_may_be_registered_after_the_restore(tmp_path: Path) -> None:
    units = layout("ab", "c")
    servers = made(units, 2)
    servers.upload(first_values(units))
    step(servers, 0)
    save(servers, str(tmp_path), optimizer_of(units))
    late = ShardEngine()
    late.configure(job_of(units), 0, 1)
    restore(late, str(tmp_path), 1)
    late.optimizer.set(optimizer_of(units))
    early = restored(made(units, 1), str(tmp_path), 1)
    for unit, owned in early.engines[0].slices.items():
        assert {n: s.tobytes() for n, s in late.slices[unit].master.state.items()} == {
            n: s.tobytes() for n, s in owned.master.state.items()
        }
        assert (
            late.slices[unit].master.parameter_updates()
            == owned.master.parameter_updates()
            == (1,) * len(units.units[unit].parameters)
        )


@pytest.mark.parametrize("late", [False, True])
def test_moments_of_another_optimizer_are_not_taken(tmp_path: Path, late: bool) -> None:
    units = layout("ab")
    servers = made(units, 1)
    servers.upload(first_values(units))
    step(servers, 0)
    save(servers, str(tmp_path), optimizer_of(units))
    engine = ShardEngine()
    engine.configure(job_of(units), 0, 1)
    lion = OptimizerSpec(name="lion", groups=({"lr": 0.1},), group_of=(0, 0))
    if not late:
        engine.optimizer.set(lion)
    restore(engine, str(tmp_path), 1)
    if late:
        engine.optimizer.set(lion)
    assert list(engine.slices[0].master.state) == ["exp_avg"]
    assert not engine.slices[0].master.state["exp_avg"].any()
    assert engine.slices[0].master.parameter_updates() == (0, 0)


def test_frozen_units_come_along_and_may_thaw(tmp_path: Path) -> None:
    old = layout("ab", "c", frozen=[1])
    servers = made(old, 2)
    servers.upload(first_values(old))
    step(servers, 0)
    save(servers, str(tmp_path), optimizer_of(old))
    new = restored(made(layout("ac", "b"), 1), str(tmp_path), 1)
    assert by_name(new)["c"].tobytes() == by_name(servers)["c"].tobytes()
    assert new.engines[0].slices[0].master.parameter_updates() == (1, 0)
    assert not new.engines[0].slices[0].master.state["exp_avg"][NUMELS["a"] :].any()
    step(new, 1)


def test_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    units = layout("ab")
    engine = ShardEngine()
    engine.configure(job_of(units), 0, 1)
    servers = Servers(job_of(units))
    servers.upload(first_values(units))
    save(servers, str(tmp_path), None)
    restore(engine, str(tmp_path), 0)
    engine.optimizer.set(optimizer_of(units))
    assert engine.slices[0].master.values.tobytes() == first_values(units)[0].tobytes()


# ---------------------------------------------------------------------- refusals, before anything is overwritten


def test_what_does_not_fit_is_found_first(tmp_path: Path) -> None:
    units = layout("ab", "c")
    servers = made(units, 2)
    servers.upload(first_values(units))
    step(servers, 0)
    save(servers, str(tmp_path), optimizer_of(units))
    with pytest.raises(InvalidRequest, match="no parameter 'd'"):
        snapshot.prepare(made(layout("ab", "cd"), 1).engines[0], str(tmp_path), 1)
    with pytest.raises(CheckpointCorrupt, match="of version 1; version 2 was ordered"):
        snapshot.prepare(servers.engines[0], str(tmp_path), 2)
    with pytest.raises(Misuse, match="no layout yet"):
        snapshot.prepare(ShardEngine(), str(tmp_path), 1)
    damaged = tmp_path / read_manifest(str(tmp_path)).files[1].name
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=f"{damaged.name} has SHA-256"):
        snapshot.prepare(servers.engines[1], str(tmp_path), 1)
    snapshot.prepare(servers.engines[0], str(tmp_path), 1)  # needs the other file only
    begin = servers.plan.slices[0][1].begin
    servers.engines[1].parameters.begin_restore()
    assert not servers.engines[1].parameters.available(0, begin, 1)
    servers.engines[1].parameters.cancel_restore()
    assert servers.engines[1].parameters.available(0, begin, 1)


def test_nothing_is_saved_before_there_are_values(tmp_path: Path) -> None:
    pins = VersionPins()
    engine = made(layout("ab"), 1).engines[0]
    with pytest.raises(Misuse, match="holds no parameters yet"):
        snapshot.write(engine, str(tmp_path), 0, 0, 1, pins, pins.pin(0))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- beside training


def test_a_snapshot_is_of_its_version_while_training_goes_on(tmp_path: Path) -> None:
    """The order comes at version 1, the next commit right behind it: the file has version 1, the servers version 2."""

    async def scenario() -> tuple[dict[str, bytes], dict[str, bytes]]:
        units = layout("ab", "c", "de")
        servers = made(units, 1, chunk_numel=32)
        servers.upload(first_values(units))
        step(servers, 0)
        expected = {n: v.tobytes() for n, v in by_name(servers).items()}
        (engine,) = servers.engines
        pins = VersionPins()
        done = asyncio.Event()
        left = [0]

        def finished(owned: OwnedSlice) -> None:
            owned.finish()
            pins.notify()
            left[0] -= 1
            if not left[0]:
                done.set()

        failures: list[BaseException] = []
        pool = ApplyPool(engine, pins, 2, finished, failures.append)
        pin = pins.pin(1)
        for u, unit in enumerate(units.units):
            servers.push(u, 0, np.ones(unit.numel, np.float32))
        changed = engine.decide(commit_of(engine))
        left[0] = len(changed)
        pool.start(changed)  # its threads wait at the first unit
        files = [await asyncio.to_thread(snapshot.write, engine, str(tmp_path), 1, 0, 1, pins, pin)]
        pins.release(pin)
        await done.wait()
        pool.close()
        assert not failures
        assert engine.version == 2
        manifest = Manifest(
            job="j", version=1, layout=units, optimizer=optimizer_of(units), num_servers=1,
            options=servers.spec.options, files=tuple(files),
        )  # fmt: skip
        write_manifest(str(tmp_path), manifest)
        got = restored(made(units, 1), str(tmp_path), 1)
        assert got.engines[0].slices[0].master.parameter_updates() == (1, 1)
        return expected, {n: v.tobytes() for n, v in by_name(got).items()}

    expected, got = asyncio.run(scenario())
    assert got == expected


def test_a_snapshot_waits_for_the_apply_that_leads_to_its_version(tmp_path: Path) -> None:
    units = layout("ab", "c")
    servers = made(units, 1)
    servers.upload(first_values(units))
    (engine,) = servers.engines
    for u, unit in enumerate(units.units):
        servers.push(u, 0, np.ones(unit.numel, np.float32))
    changed = engine.decide(commit_of(engine))
    pins = VersionPins()
    pin = pins.pin(1)
    entries = []
    writer = threading.Thread(target=lambda: entries.append(snapshot.write(engine, str(tmp_path), 1, 0, 1, pins, pin)))
    writer.start()
    for owned in changed:
        assert not entries
        for index in range(len(owned.chunks.bounds)):
            owned.change.apply(index, index + 1, engine.scratch())
        owned.finish()
        pins.notify()
    writer.join()
    assert len(entries) == 1


def test_a_server_that_stops_gives_up_its_snapshot(tmp_path: Path) -> None:
    servers = made(layout("ab"), 1)
    servers.upload(first_values(servers.spec.layout))
    pins = VersionPins()
    pin = pins.pin(7)
    pins.close()
    with pytest.raises(Closed, match="the checkpoint is not written"):
        snapshot.write(servers.engines[0], str(tmp_path), 7, 0, 1, pins, pin)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_hangs_fails_the_checkpoint_and_not_the_step(tmp_path: Path, caplog: Any) -> None:
    servers = made(layout("ab"), 1)
    servers.upload(first_values(servers.spec.layout))
    pins = VersionPins(stalled_s=0.02)
    pin, later = pins.pin(0), pins.pin(1)
    pins.wait_for_pins(0, 1)  # nobody writes
    assert "the checkpoint of version 0 has not moved" in caplog.text
    with pytest.raises(CheckpointError, match="the checkpoint of version 0 was given up, see to its storage"):
        snapshot.write(servers.engines[0], str(tmp_path), 0, 0, 1, pins, pin)
    assert list(tmp_path.iterdir()) == []
    assert not later.expired


def test_a_kernel_that_fails_is_reported() -> None:
    async def scenario() -> BaseException:
        servers = Servers(job_of(layout_of([10])), optimizer=one_group(layout_of([10]), lr=0.1))
        servers.upload([np.ones(10, np.float32)])
        servers.push(0, 0, np.ones(10, np.float32))
        (engine,) = servers.engines
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        pool = ApplyPool(engine, VersionPins(), None, OwnedSlice.finish, failed.set_result)
        slices = engine.decide(commit_of(engine))
        engine.slices[0].change = None
        pool.start(slices)
        error = await failed
        pool.close()
        return error

    assert isinstance(asyncio.run(scenario()), AssertionError)


# ---------------------------------------------------------------------- export


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("dtype", [None, DType.F32, DType.BF16, DType.F16])
def test_export_loads_with_safetensors(tmp_path: Path, num_servers: int, dtype: DType | None) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    names = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F64: torch.float64}
    own = {"w": DType.BF16, "s": DType.F32, "x": DType.F16, "y": DType.F64}
    units = Layout(
        units=(
            build_unit("a", [("w", (9, 31), own["w"]), ("s", (), own["s"])]),
            build_unit("b", [("x", (5, 2, 3), own["x"]), ("y", (40,), own["y"])], trainable=False),
        )
    )
    servers = Servers(job_of(units), num_servers)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(u.numel).astype(np.float32) for u in units.units]
    servers.upload(values)
    save(servers, str(tmp_path / "checkpoint"), None)
    target = tmp_path / "out" / "model.safetensors"
    written = export_model(str(tmp_path / "checkpoint"), str(target), dtype)
    assert written == target.stat().st_size
    got = load_file(target)
    assert sorted(got) == ["s", "w", "x", "y"]
    for u, p in units.parameters():
        expected = torch.from_numpy(values[u][p.offset : p.end].reshape(p.shape)).to(names[dtype or own[p.name]])
        assert got[p.name].dtype is expected.dtype
        assert torch.equal(got[p.name], expected)


def test_tied_parameters_are_exported_once(tmp_path: Path) -> None:
    from dataclasses import replace

    from safetensors.numpy import load_file

    unit = build_unit("a", [("w", (4,), DType.F32)])
    unit = replace(unit, parameters=(replace(unit.parameters[0], aliases=("head.w",)),))
    servers = Servers(job_of(Layout(units=(unit,))))
    servers.upload([np.arange(4, dtype=np.float32)])
    save(servers, str(tmp_path), None)
    export_model(str(tmp_path), f"file://{tmp_path}/m.safetensors")
    assert list(load_file(tmp_path / "m.safetensors")) == ["w"]


def test_export_refuses_what_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dtype is 'i64'"):
        export_model(str(tmp_path), str(tmp_path / "m"), DType.I64)
    with pytest.raises(InvalidRequest, match="does not end in a file name"):
        export_model(str(tmp_path), f"{tmp_path}/")


@pytest.mark.parametrize("copying", [True, False])
def test_a_slice_that_comes_while_a_checkpoint_is_read(tmp_path: Path, copying: bool) -> None:
    """One that is copied has its values from its primary; any other one is missed, and said so."""
    units = layout("ab", "cd")
    servers = made(units, 1)
    servers.upload(first_values(units))
    save(servers, str(tmp_path), optimizer_of(units))
    (engine,) = servers.engines
    engine.parameters.begin_restore()
    prepared = snapshot.prepare(engine, str(tmp_path), servers.version)
    del prepared.moves[1]
    engine.slices[1].copying = copying
    engine.parameters.withdraw()
    if copying:
        snapshot.load(engine, prepared)
        return
    with pytest.raises(Busy, match="slice 1 came while .* was being read; restore it again"):
        snapshot.load(engine, prepared)
