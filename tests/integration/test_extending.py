"""docs/extend_*.md: what they build works, beside somebody else's code, and takes as many files as they say."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from axon_ps import World
from axon_ps.compress import registry as compressors
from axon_ps.compress.registry import compressor
from axon_ps.errors import AxonError, Closed, NotLeader
from axon_ps.optim import create
from axon_ps.optim import registry as optimizers
from axon_ps.storage.state_store import Record, open_store
from axon_ps.testing import LocalCluster
from axon_ps.types import DType
from axon_ps_lab.conformance import run_in_threads

PAGES = {p.stem.removeprefix("extend_"): p.read_text() for p in Path(__file__).parents[2].glob("docs/extend_*.md")}
FILES = {
    name: content
    for page in PAGES.values()
    for name, content in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the files of the pages, on the path. Their registrations are gone afterwards."""
    path = tmp_path_factory.mktemp("extending")
    for name, content in FILES.items():
        (path / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(path)])
        for registry in (optimizers._REGISTRY, compressors._REGISTRY):
            patch.setattr(registry, "_classes", dict(registry._classes))
        yield path
        for name in FILES:
            sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def adamax() -> ModuleType:
    return importlib.import_module("adamax")


@pytest.fixture
def sign() -> ModuleType:
    return importlib.import_module("sign")


def files_of(page: str) -> list[str]:
    """The files that a page makes."""
    return re.findall(r"^# (\w+\.py)$", PAGES[page], flags=re.MULTILINE)


def test_an_optimizer_and_a_compressor_take_two_files_each() -> None:
    assert files_of("optimizer") == ["adamax.py", "train_adamax.py"]
    assert files_of("compressor") == ["sign.py", "train_sign.py"]


def run_script(path: str) -> None:
    runpy.run_path(path)


@pytest.mark.parametrize(("plugin", "script"), [("adamax", "train_adamax.py"), ("sign", "train_sign.py")])
def test_a_real_cluster_trains_with_it(directory: Path, plugin: str, script: str) -> None:
    with LocalCluster(shards=2, world_size=2, plugins=[plugin]) as cluster:
        cluster.run_workers(run_script, args=(str(directory / script),))


def train_one_step(path: str) -> None:
    from axon_ps.parallel import FSDP, ServerOptimizer

    sys.path.append(path)
    adamax = importlib.import_module("adamax")
    with World.init() as world:
        model = FSDP(torch.nn.Linear(4, 4), world)
        optimizer = ServerOptimizer(model.parameters(), adamax.Adamax.name)
        model(torch.ones(2, 4)).sum().backward()
        assert optimizer.step().committed


def restart_shard_without_plugins(cluster: LocalCluster) -> None:
    cluster.kill("shard")
    cluster._environment.plugins = ()
    cluster.restart("shard")


def test_a_shard_server_without_the_plugin_is_named_to_the_worker(directory: Path) -> None:
    with LocalCluster(shards=1, world_size=1, plugins=["adamax"]) as cluster:
        restart_shard_without_plugins(cluster)
        (result,) = cluster.run_workers(train_one_step, args=(str(directory),), check=False)
        assert re.search(r"InvalidRequest: .*shard server 0 .* not know optimizer 'adamax'.*--plugins", result.error)


def test_a_shard_server_without_the_plugin_cannot_join_a_job_that_needs_it(directory: Path) -> None:
    refused = r"did not start(.|\n)*the shard server at .* optimizer 'adamax'.*--plugins"
    with (
        pytest.raises(AxonError, match=refused),
        LocalCluster(shards=1, world_size=1, plugins=["adamax"]) as cluster,
    ):
        cluster.run_workers(train_one_step, args=(str(directory),))
        restart_shard_without_plugins(cluster)


@pytest.mark.parametrize("grad_scale", [1.0, 0.3])
def test_the_optimizer_is_torchs_adamax(adamax: ModuleType, grad_scale: float) -> None:
    rng = np.random.default_rng(0)
    hyper = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    ours, param = create("adamax"), rng.standard_normal(1000, dtype=np.float32)
    assert type(ours) is adamax.Adamax
    theirs = torch.nn.Parameter(torch.from_numpy(param.copy()))
    optimizer = torch.optim.Adamax([theirs], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    state, wire = (np.zeros(1000, np.float32), np.zeros(1000, np.float32)), np.empty(1000, np.uint16)
    for update in range(1, 6):
        grad = rng.standard_normal(1000, dtype=np.float32)
        theirs.grad = torch.from_numpy(grad * np.float32(grad_scale))
        optimizer.step()
        ours.apply(param, grad, state, wire, DType.BF16, ours.validate(hyper), update, grad_scale)
        np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert wire.tobytes() == torch.from_numpy(param).to(torch.bfloat16).view(torch.uint16).numpy().tobytes()
    ours.warm_up([hyper], DType.F16)


def test_the_compressor_sends_signs_and_loses_nothing_over_time(sign: ModuleType) -> None:
    values = np.random.default_rng(0).standard_normal(37, dtype=np.float32)
    c = compressor("sign", block_numel=16)
    assert c == sign.Sign(16)
    c.warm_up()
    data, out, residual = np.empty(c.compressed_bytes(37), np.uint8), np.empty(37, np.float32), np.zeros(37, np.float32)
    c.compress(values, data, residual)
    c.decompress(data, out)
    blocks = torch.from_numpy(values).split(16)
    expected = torch.cat([block.abs().mean() * block.sign() for block in blocks]).numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert residual.tobytes() == (values - out).tobytes()
    acc = out.copy()
    c.accumulate(data, acc)
    assert acc.tobytes() == (out + out).tobytes()
    c.compress(np.full(37, np.nan, np.float32), data, residual)
    assert np.isfinite(residual).all()
    c.decompress(data, out)
    assert np.isnan(out).all()


def test_the_state_store_survives_and_a_failed_batch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("json_store")
    path = tmp_path / "state.json"
    with open_store("json", str(path)) as store:
        store.apply([Record("a", b"1"), Record("b", b"\x00"), Record("a", b"2")])
        (tmp_path / "state.json.new").mkdir()
        with pytest.raises(AxonError, match=r"cannot be written"):
            store.apply([Record("c", b"3")])
        (tmp_path / "state.json.new").rmdir()
        store.apply([Record("b", None), Record("absent", None)])
        for broken in ("open", "fsync"):
            sync = getattr(os, broken)

            def fail(what: Any, *_: Any, sync: Any = sync) -> Any:
                if isinstance(what, str) or stat.S_ISDIR(os.fstat(what).st_mode):
                    raise OSError(5, "Input/output error")
                return sync(what)

            with monkeypatch.context() as patched, pytest.raises(NotLeader, match="may not outlive its machine"):
                patched.setattr(os, broken, fail)
                store.apply([Record("d", broken.encode())])
            assert store.load() == {"a": b"2", "d": broken.encode()}
            assert open_store("json", str(path)).load() == store.load()
        store.apply([Record("d", None)])
    with pytest.raises(Closed):
        store.load()
    assert open_store("json", str(path)).load() == {"a": b"2"}
    path.write_text("{")
    with pytest.raises(AxonError, match="cannot be read"):
        open_store("json", str(path))


@pytest.mark.parametrize("n", [1, 3])
def test_the_backend_does_all_that_backends_do(n: int) -> None:
    backend = importlib.import_module("store_backend").StoreBackend
    assert [failure for report in run_in_threads(n, backend) for failure in report.failures] == []


def test_the_backend_serves_groups_of_a_real_job(directory: Path) -> None:
    with LocalCluster(shards=1, world_size=2) as cluster:
        cluster.run_workers(run_script, args=(str(directory / "use_store_backend.py"),))


def test_a_world_in_this_process_has_what_this_process_has_imported(adamax: ModuleType) -> None:
    from axon_ps.parallel import FSDP, ServerOptimizer

    with World.mock() as world:
        model = FSDP(torch.nn.Linear(4, 4), world)
        optimizer = ServerOptimizer(model.parameters(), adamax.Adamax.name, lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        assert optimizer.step().committed
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
