"""Checkpoints of models that a mesh cuts: restored as other boxes, as whole tensors and back, and exported whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from axon_ps.errors import CheckpointCorrupt, InvalidRequest
from axon_ps.shard.full_model import FullModel
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit
from axon_ps.sharding.raw import encoded_as, tensor_of
from axon_ps.storage import contents
from axon_ps.storage.export import export_model
from axon_ps.storage.hf_directory import export_directory
from axon_ps.storage.manifest import read_manifest
from axon_ps.types import Array, DType, OptimizerSpec
from engine_driver import Servers, job_of
from test_snapshot import restore, restored, save

SHAPES = {"up.weight": (24, 6), "up.bias": (24,), "down.weight": (6, 24), "experts": (4, 6, 8), "norm": (6,), "s": ()}
GROUPS = ({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0})

# per tensor, the parts into which a mesh cuts each dimension
Cut = dict[str, tuple[int, ...]]
WHOLE: Cut = {}
TWO: Cut = {"up.weight": (2, 1), "up.bias": (2,), "down.weight": (1, 2), "experts": (2, 1, 1), "norm": (1,)}
FOUR: Cut = {"up.weight": (4, 1), "up.bias": (4,), "down.weight": (1, 4), "experts": (2, 1, 2)}
UNEVEN: Cut = {"up.weight": (5, 2), "down.weight": (2, 5), "experts": (3, 1, 3)}
CUTS = {"whole": WHOLE, "two": TWO, "four": FOUR, "uneven": UNEVEN}


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """Beginning and size of each part, as torch.chunk makes them."""
    width = -(-size // parts)
    return [(begin, min(width, size - begin)) for begin in range(0, size, width)]


def layout_of(cut: Cut) -> Layout:
    """A unit "block" and a unit "rest" of each part; the last tensor of a part's unit is another in each cut."""
    units: dict[str, list[Parameter]] = {}
    for name in SHAPES if len(cut) % 2 else reversed(SHAPES):
        shape = SHAPES[name]
        grid = [chunks(size, parts) for size, parts in zip(shape, cut.get(name, (1,) * len(shape)), strict=True)]
        for part, index in enumerate(np.ndindex(*(len(axis) for axis in grid))):
            begin = tuple(axis[i][0] for axis, i in zip(grid, index, strict=True))
            size = tuple(axis[i][1] for axis, i in zip(grid, index, strict=True))
            of_unit = units.setdefault(f"part{part}/{'block' if '.' in name else 'rest'}", [])
            whole = FullTensor(name=name, shape=shape, begin=begin) if name in cut else None
            own = f"part{part}/{name}" if name in cut else name
            offset = of_unit[-1].end if of_unit else 0
            of_unit.append(Parameter(name=own, shape=size, offset=offset, full=whole))
    return Layout(units=tuple(Unit(name=name, parameters=tuple(of)) for name, of in units.items()))


def box(p: Parameter) -> tuple[slice, ...]:
    return tuple(slice(b, b + n) for b, n in zip(p.tensor.begin, p.shape, strict=True))


def cut_into(layout: Layout, tensors: dict[str, Array]) -> list[Array]:
    """The units of a layout."""
    return [np.concatenate([tensors[p.tensor.name][box(p)].reshape(-1) for p in u.parameters]) for u in layout.units]


def joined(layout: Layout, units: list[Array]) -> dict[str, Array]:
    """The whole tensors."""
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
    for u, p in layout.parameters():
        found[p.tensor.name][box(p)] = units[u][p.offset : p.end].reshape(p.shape)
    return found


def random(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def made(cut: Cut, num_servers: int) -> Servers:
    layout = layout_of(cut)
    group_of = tuple(0 if ".weight" in p.tensor.name else 1 for _, p in layout.parameters())
    optimizer = OptimizerSpec(name="adamw", groups=GROUPS, group_of=group_of)
    return Servers(job_of(layout, chunk_numel=16), num_servers, optimizer=optimizer)


def step(servers: Servers, seed: int) -> None:
    servers.train_step([cut_into(servers.spec.layout, random(seed))])


def trained(cut: Cut, num_servers: int) -> Servers:
    servers = made(cut, num_servers)
    servers.upload(cut_into(servers.spec.layout, random(0)))
    for seed in range(1, 4):
        step(servers, seed)
    return servers


def values(servers: Servers) -> dict[str, Array]:
    return joined(servers.spec.layout, [servers.values(u) for u in range(len(servers.spec.layout.units))])


def moment(servers: Servers, name: str) -> dict[str, Array]:
    units = [np.empty(u.numel, np.float32) for u in servers.spec.layout.units]
    for s in servers.plan.numbered:
        units[s.unit][s.begin : s.end] = servers.slice_of(s).master.moments.arrays[name]
    return joined(servers.spec.layout, units)


def equal(got: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return all(got[name].tobytes() == wanted[name].tobytes() for name in SHAPES)


@pytest.mark.parametrize("source", CUTS)
@pytest.mark.parametrize("target", CUTS)
def test_training_goes_on_with_the_same_bits_at_another_mesh(tmp_path: Path, source: str, target: str) -> None:
    before = trained(CUTS[source], 3)
    optimizer = before.engines[0].optimizer.updater
    assert optimizer is not None
    save(before, str(tmp_path), optimizer.spec)
    after = restored(made(CUTS[target], 2), str(tmp_path), 3)
    assert equal(values(after), values(before))
    for name in ("exp_avg", "exp_avg_sq"):
        assert equal(moment(after, name), moment(before, name))
    updates = {n for engine in after.engines for s in engine.slices.values() for n in s.master.parameter_updates()}
    assert updates <= {0, 3}, "0 is of parameters outside the slice"
    step(after, 4)
    step(before, 4)
    assert equal(values(after), values(before))


@pytest.mark.parametrize("cut", CUTS)
def test_exports_have_whole_tensors(tmp_path: Path, cut: str) -> None:
    servers = trained(CUTS[cut], 2)
    save(servers, str(tmp_path / "checkpoint"), None)
    export_model(str(tmp_path / "checkpoint"), str(tmp_path / "m.safetensors"))
    assert equal(load_file(tmp_path / "m.safetensors"), values(servers))
    export_directory(str(tmp_path / "checkpoint"), str(tmp_path / "out"), prefix="up.", max_file_bytes=1)
    found = {name: t for f in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(f).items()}
    assert {name: t.tobytes() for name, t in found.items()} == {
        name.removeprefix("up."): values(servers)[name].tobytes() for name in ("up.weight", "up.bias")
    }


@pytest.mark.parametrize(("block", "gap"), [(1, 1 << 14), (20, 1 << 14), (1 << 20, 0)])
def test_it_does_not_matter_how_many_runs_are_read_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: int, gap: int
) -> None:
    before = trained(FOUR, 3)
    save(before, str(tmp_path), None)
    monkeypatch.setattr(contents, "BLOCK_NUMEL", block)
    monkeypatch.setattr(contents, "_GAP_NUMEL", gap)
    assert equal(values(restored(made(UNEVEN, 2), str(tmp_path), 3)), values(before))


def test_a_server_reads_only_the_files_that_have_its_boxes(tmp_path: Path) -> None:
    servers = trained(TWO, 4)
    save(servers, str(tmp_path), None)
    for entry in read_manifest(str(tmp_path)).files[1:]:
        (tmp_path / entry.name).unlink()
    before = {number: owned.master.values.copy() for number, owned in servers.engines[0].slices.items()}
    restore(servers.engines[0], str(tmp_path), 3)
    for number, owned in servers.engines[0].slices.items():
        assert owned.master.values.tobytes() == before[number].tobytes()
    with pytest.raises(CheckpointCorrupt, match="lacks the file"):
        restored(made(FOUR, 1), str(tmp_path), 3)


def test_a_full_model_reads_boxes(tmp_path: Path) -> None:
    servers = trained(FOUR, 2)
    save(servers, str(tmp_path), None)
    spec = job_of(layout_of(WHOLE))
    model = FullModel(spec)
    model.read(read_manifest(str(tmp_path)))
    assert equal(joined(spec.layout, [model.values(u) for u in range(len(spec.layout.units))]), values(servers))


def test_tensors_of_another_shape_are_refused_by_their_name(tmp_path: Path) -> None:
    save(trained(TWO, 1), str(tmp_path), None)
    whole = FullTensor(name="up.weight", shape=(24, 12), begin=(0, 0))
    other = Layout(units=(Unit(name="u", parameters=(Parameter(name="p", shape=(24, 12), offset=0, full=whole),)),))
    with pytest.raises(InvalidRequest, match=r"'up.weight' has shape \(24, 6\) in the checkpoint and \(24, 12\) in"):
        restored(Servers(job_of(other)), str(tmp_path), 3)


def frozen(dtype: DType, begins: list[int], *, raw: bool) -> Layout:
    """A frozen tensor of 6 x 10, cut before these columns."""
    units = []
    for begin, end in zip(begins, [*begins[1:], 10], strict=True):
        whole = FullTensor(name="w", shape=(6, 10), begin=(0, begin))
        box = Parameter(name=f"w@{begin}", shape=(6, end - begin), offset=0, dtype=dtype, raw=raw, full=whole)
        units.append(Unit(name=f"u{begin}", parameters=(box,), trainable=False))
    return Layout(units=tuple(units))


@pytest.mark.parametrize("target_raw", [True, False])
@pytest.mark.parametrize("source_raw", [True, False])
def test_frozen_boxes_of_half_words(tmp_path: Path, source_raw: bool, target_raw: bool) -> None:
    """Rows of bf16 that begin and end inside of a word."""
    tensor = encoded_as(np.arange(60, dtype=np.float32), DType.BF16).reshape(6, 10)
    old, new = (frozen(DType.BF16, begins, raw=raw) for begins, raw in (([0, 3], source_raw), ([0, 1, 6], target_raw)))

    def units_of(of: Layout) -> list[Array]:
        units = [np.zeros(unit.numel, np.float32) for unit in of.units]
        for u, p in of.parameters():
            numbers = np.arange(60, dtype=np.float32).reshape(6, 10)
            tensor_of(units[u], p)[...] = (tensor if p.raw else numbers)[p.box]
        return units

    servers = Servers(job_of(old, chunk_numel=4, min_slice_numel=8), 3)
    servers.upload(units_of(old))
    save(servers, str(tmp_path / "checkpoint"), None)
    found = restored(Servers(job_of(new, chunk_numel=4, min_slice_numel=4), 2), str(tmp_path / "checkpoint"), 0)
    for u, wanted in enumerate(units_of(new)):
        assert found.values(u).tobytes() == wanted.tobytes()
    export_model(str(tmp_path / "checkpoint"), str(tmp_path / "m.safetensors"))
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert str(file.get_tensor("w").dtype) == "torch.bfloat16"
        assert file.get_tensor("w").float().numpy().tobytes() == np.arange(60, dtype=np.float32).tobytes()
