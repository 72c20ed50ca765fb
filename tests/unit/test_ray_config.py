"""`axon_ps.ray` without Ray: what can be asked for, and that nothing of Ray is loaded for it.

Tests of `ray/config.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import axon_ps.ray
from axon_ps.errors import ConfigurationError
from axon_ps.ray import ClusterConfig
from axon_ps.rpc.security import Security
from deadlines import HANG_S


def test_importing_it_loads_neither_ray_nor_torch() -> None:
    code = "import sys, axon_ps.ray; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "axon_ps.ray.cluster", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'axon-ps\[ray\]'"):
        from axon_ps.ray import RayCluster  # noqa: F401
    with pytest.raises(AttributeError, match="nonsense"):
        _ = axon_ps.ray.nonsense  # type: ignore[attr-defined]
    assert "RayCluster" in dir(axon_ps.ray)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "NEAR"}, "placement is 'NEAR'; it must be one of SPREAD, "),
        ({"coordinators": 2}, "coordinators is 2 and state ''.*etcd:HOST:PORT"),
        ({"coordinators": 0}, "coordinators is 0"),
        ({"start_timeout_s": 0}, "start_timeout_s is 0; it must be positive and finite"),
        ({"shards": 1, "replication": 2}, "replication is 2, and there are 1 shard servers"),
        ({"min_workers": 0}, "min_workers is 0"),
        ({"checkpoint_every": "10m"}, "no directory is given"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ClusterConfig(**options)  # type: ignore[arg-type]


def test_a_job_gets_a_name_and_a_token_of_its_own() -> None:
    one, other = ClusterConfig().named(), ClusterConfig().named()
    assert one.job != other.job
    assert one.security.token != other.security.token
    given = ClusterConfig(job="gpt", security=Security(token="known")).named()
    assert (given.job, given.security.token) == ("gpt", "known")
    assert given.coordinator(4).world_size == 4
    assert given.coordinator(4).job == "gpt"
