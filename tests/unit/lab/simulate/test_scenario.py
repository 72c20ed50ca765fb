"""The file of a scenario: what it may say, and what is answered to what it may not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from axon_ps.cli.launch import run as cli
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import FSDP, DiLoCo, MixedPrecision
from axon_ps.parallel.fsdp.on_servers import traffic
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.tables import ModelTable

LEAST: dict[str, Any] = {"model": {"blocks": 2, "block_numel": 1000}, "workers": [{"compute_s": 0.1}]}


def test_a_transformer_has_the_parameters_of_its_shape() -> None:
    """GPT-2 small without its positions and the norms' biases of the end: 124.4 million are published."""
    tables = {**LEAST, "model": {"transformer": {"layers": 12, "width": 768, "vocabulary": 50257}}}
    assert Scenario.of(tables).model.numel == pytest.approx(124.4e6, rel=0.01)
    untied = ModelTable.transformer(layers=12, width=768, vocabulary=50257, tied=False)
    assert untied.numel - Scenario.of(tables).model.numel == 768 * 50257


def test_compute_follows_from_operations_a_second() -> None:
    tables = {**LEAST, "job": {"tokens": 1000}, "workers": [{"flops": 1e9}]}
    scenario = Scenario.of(tables)
    assert scenario.workers[0].step_s(scenario.model, scenario.job) == pytest.approx(6 * 2001 * 1000 / 1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modell": {}}, "the file has modell; known are"),
        ({"model": {}}, "model.blocks is 0; it must be at least 1"),
        ({"model": {"blocks": 2, "block_numel": 1000, "layers": 3}}, "has layers; known are blocks"),
        ({"model": {"blocks": 2.5, "block_numel": 1000}}, "model.blocks is 2.5; it must be an integer"),
        ({"model": {"blocks": True, "block_numel": 1000}}, "model.blocks is True; it must be an integer"),
        ({"model": {"transformer": {"layers": 2}}}, "it needs layers, width, vocabulary"),
        ({"model": {"transformer": {"layers": 0, "width": 1, "vocabulary": 1}}}, "layers is 0"),
        ({"job": {"strategy": "zero"}}, "job.strategy is 'zero'; it is one of full_shard"),
        ({"job": {"wire": "int2"}}, "job.wire is 'int2'"),
        ({"job": {"optimizer": "adamx"}}, "adamx"),
        ({"job": {"replication": 2}}, "job.replication is 2 with 1 servers"),
        ({"job": {"inner_steps": 5, "fragments": 2}}, "must be a multiple of fragments"),
        ({"job": {"inner_steps": 4, "fragments": 2, "overlap_steps": 2}}, "overlap_steps below the quotient"),
        ({"workers": []}, "there are no workers"),
        ({"workers": [{}]}, "give one of them"),
        ({"workers": [{"compute_s": 1.0, "flops": 1e12}]}, "give one of them"),
        ({"workers": [{"compute_s": 1.0, "rate_mbit": 0}]}, "workers.rate_mbit is 0.0; it must be above 0"),
        ({"workers": [{"compute_s": 1.0, "device": "tpu"}]}, "workers.device is 'tpu'"),
        ({"workers": [{"compute_s": 1.0, "devices": 8}]}, "job.strategy = 'hybrid_shard'"),
        ({"workers": [{"compute_s": float("nan")}]}, "workers.compute_s is nan"),
        ({"workers": "many"}, "workers is 'many'; it must be a table"),
        ({"servers": {"count": 0}, "workers": [{"compute_s": 1.0}, {"compute_s": 2.0}]}, "must be in one"),
        ({"model": 5}, "model is 5; it must be a table"),
        ({"job": "fast"}, "job is 'fast'; it must be a table"),
        ({"job": {"fragments": 4000, "inner_steps": 4000}}, "job.fragments is 4000 and the model has 2001 elements"),
        ({"failures": {"min_workers": 2}}, "failures.min_workers is 2 of 1 hosts"),
        ({"failures": {"worker_mtbf_h": -1.0}}, "worker_mtbf_h is -1.0"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(")):
        Scenario.of({**LEAST, **changes})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Scenario.read(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[model\n")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Scenario.read(tmp_path / "broken.toml")


def test_what_is_not_said_is_as_the_library_has_it() -> None:
    """A scenario of a model alone is the job that a script of the same model is."""
    for servers in (1, 2, 3):
        scenario = Scenario.of({**LEAST, "servers": {"count": servers}})
        assert scenario.copies == CoordinatorConfig(num_shards=servers).copies
    job, precision = scenario.job, MixedPrecision()
    default = inspect.signature(FSDP).parameters
    assert default["sharding_strategy"].default is None
    assert job.strategy == traffic.chosen([1], gpus=False)[0].name.lower()
    assert job.offload_params == default["cpu_offload"].default.offloads_params
    assert (precision.param_dtype, job.compute) == (None, str(torch.get_default_dtype()).removeprefix("torch."))
    assert (precision.wire_dtype, job.sent) == (None, job.compute)
    assert (precision.reduce_dtype, job.reduced) == (None, job.sent)
    run = inspect.signature(cli.run).parameters
    assert scenario.servers.count != Scenario.of(LEAST).servers.count == 1, "as `axon-ps run`"
    assert (run["checkpoint_every"].default, scenario.failures.checkpoint_every_s) == ("", 0.0)
    assert (run["min_workers"].default, scenario.failures.min_workers) == (None, 0)
    local = inspect.signature(DiLoCo).parameters
    assert (job.fragments, job.overlap_steps) == (1, local["overlap_steps"].default)
