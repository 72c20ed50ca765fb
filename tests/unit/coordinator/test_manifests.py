"""Which models of a job go back to which of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.server import manifests
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.storage.checkpoint import FileEntry
from axon_ps.storage.manifest import Manifest, write_manifest
from axon_ps.types import DType


def spec_of(name: str) -> JobSpec:
    return JobSpec(layout=Layout(units=(build_unit(name, [(f"{name}.weight", (4, 3), DType.F32)]),)))


SPECS = {"policy": spec_of("a"), "critic": spec_of("b")}


def checkpoint(path: Path, **versions: int) -> str:
    sections = [
        Manifest(
            job="j",
            name=name,
            version=version,
            layout=SPECS[name].layout,
            optimizer=None,
            num_servers=1,
            options=SPECS[name].options,
            files=(FileEntry(name=f"of-{name}", sha256="0" * 64, bytes=1),),
            committed={"used": f"{version}"},
        )
        for name, version in versions.items()
    ]
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
