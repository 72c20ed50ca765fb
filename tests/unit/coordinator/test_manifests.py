"""Which models of a job go back to which of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.server import manifests
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import Manifest, write_manifest
from axon_ps.types import DType, OptimizerSpec


def spec_of(name: str) -> JobSpec:
    return JobSpec(layout=Layout(units=(build_unit(name, [(f"{name}.weight", (4, 3), DType.F32)]),)))


SPECS = {"policy": spec_of("a"), "critic": spec_of("b")}


def checkpoint(path: Path, changes: Mapping[str, Any] = MappingProxyType({}), **versions: int) -> str:
    """A checkpoint of models, with changes of what each has."""
    sections = [
        Manifest(
            job="j",
            name=name,
            version=version,
            layout=SPECS[name].layout,
            optimizer=None,
            num_servers=1,
            options=SPECS[name].options,
            files=(FileEntry(name=f"shard-{name}", sha256="0" * 64, bytes=1),),
            committed={"used": f"{version}"},
        )
        for name, version in versions.items()
    ]
    sections = [dataclasses.replace(section, **changes) for section in sections]
    write_manifest(str(path), dataclasses.replace(sections[0], others=tuple(sections[1:])))
    return str(path)


def test_all_models_go_back_or_those_that_are_named(tmp_path: Path) -> None:
    uri = checkpoint(tmp_path, policy=3, critic=8)
    both = manifests.find(uri, SPECS)
    assert [(r.model, r.section, r.version) for r in both.resumes] == [("policy", "policy", 3), ("critic", "critic", 8)]
    assert both.info.versions == {"policy": 3, "critic": 8}
    found = manifests.find(uri, SPECS, ("critic",))
    assert found.info.version == 8
    (one,) = found.resumes
    assert one == Resume(uri=both.info.uri, version=8, model="critic", section="critic", committed={"used": "8"})


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    uri = checkpoint(tmp_path / "both", policy=3, critic=8)
    with pytest.raises(InvalidRequest, match="also has model 'critic', which the job has not"):
        manifests.find(uri, {"policy": SPECS["policy"]})
    with pytest.raises(InvalidRequest, match="has no model 'third': it has 'policy', 'critic'"):
        manifests.find(uri, {**SPECS, "third": SPECS["policy"]})
    with pytest.raises(InvalidRequest, match="the job has no model 'nobody' to restore; it has 'policy', 'critic'"):
        manifests.find(uri, SPECS, ("nobody",))
    alone = checkpoint(tmp_path / "alone", policy=3)
    with pytest.raises(InvalidRequest, match="has no model 'critic'"):
        manifests.find(alone, SPECS)


def test_the_only_model_of_a_checkpoint_fits_the_only_one_of_a_job(tmp_path: Path) -> None:
    uri = checkpoint(tmp_path, policy=3)
    (resume,) = manifests.find(uri, {"renamed": SPECS["policy"]}).resumes
    assert (resume.model, resume.section, resume.version) == ("renamed", "policy", 3)
    with pytest.raises(InvalidRequest, match="weight"):
        manifests.find(uri, {"renamed": SPECS["critic"]})


def test_a_job_that_resumes_takes_each_model_that_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = checkpoint(tmp_path, policy=3)
    first = manifests.begin(uri, {"policy": SPECS["policy"]}, "policy")
    assert first is not None
    assert first.version == 3
    assert manifests.begin(uri, SPECS, "critic") is None
    assert "has no model 'critic' (it has 'policy')" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"committed": {"a": f'"{"x" * 5000}"'}}, "at most 4096"),
        ({"optimizer": OptimizerSpec(name="none", groups=({},), group_of=(0,))}, "optimizer 'none'"),
        (
            {"optimizer": OptimizerSpec(name="sgd", groups=({"beta1": 1.0},), group_of=(0,))},
            "no hyperparameter 'beta1'",
        ),
        ({"optimizer": OptimizerSpec(name="sgd", groups=({"lr": -1.0},), group_of=(0,))}, "lr"),
        ({"optimizer": OptimizerSpec(name="sgd", groups=({},), group_of=(0,), moments=({"lr": 1e99},))}, "lr"),
    ],
)
def test_what_the_job_cannot_take_is_refused_before_servers_are_told(
    tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    uri = checkpoint(tmp_path, changes, policy=3)
    with pytest.raises(InvalidRequest, match=words):
        manifests.find(uri, {"policy": SPECS["policy"]})


def test_what_is_saved_with_a_checkpoint_can_be_read_again() -> None:
    assert manifests.check_extra("") == {}
    assert manifests.check_extra('{"loss": Infinity}') == {"loss": float("inf")}
    for extra_json, words in (("[" * 100_000, "has more than 400 lists"), ("[1]", "JSON list"), ("{", "is not JSON")):
        with pytest.raises(InvalidRequest, match=words):
            manifests.check_extra(extra_json)
