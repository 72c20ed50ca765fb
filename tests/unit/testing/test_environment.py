"""`ClusterEnvironment`: the variables of a cluster's processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_ps.rpc.security import Security
from axon_ps.testing.environment import ClusterEnvironment, of_process


def test_a_job_has_tokens_unless_it_wants_none() -> None:
    ours, given, none = (ClusterEnvironment("j", token) for token in (None, "secret", ""))
    assert len({ours.token, ours.observer_token, given.observer_token, ""}) == 4
    assert given.token == given.security.token == "secret"
    assert (none.token, none.observer_token, none.security.token) == ("", "", "")
    assert "AXON_PS_OBSERVER_TOKEN" not in none.of_service(Path("/logs"))


def test_a_worker_finds_the_job() -> None:
    environment = ClusterEnvironment("j", "", variables={"MINE": "1", "OMP_NUM_THREADS": "2"})
    values = environment.of_worker("h:1,h:2", 3, 4)
    assert {k: values[k] for k in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
    }
    assert (values["AXON_PS_COORDINATOR"], values["AXON_PS_JOB"], values["MINE"]) == ("h:1,h:2", "j", "1")
    assert values["OMP_NUM_THREADS"] == "2"
    assert "RANK" not in environment.of_worker("h:1", -1, 4)


def test_a_service_has_logs_plugins_and_what_the_test_gives() -> None:
    environment = ClusterEnvironment(
        "j",
        "secret",
        security=Security(mutual=True, ca_file="ca.pem"),
        plugins=["one", "two"],
        variables={"AXON_PS_LOG": "json", "MINE": "1"},
    )
    values = environment.of_service(Path("/logs"))
    assert (values["AXON_PS_LOG"], values["AXON_PS_AUDIT_LOG"]) == ("json", "/logs/audit.jsonl")
    assert (values["AXON_PS_PLUGINS"], values["AXON_PS_TLS_MUTUAL"], values["MINE"]) == ("one,two", "1", "1")
    assert values["AXON_PS_OBSERVER_TOKEN"] == environment.observer_token
    assert not environment.security.mutual


def test_a_process_does_not_get_the_variables_of_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "AXON_PS_JOB", "AXON_PS_TOKEN", "OF_THE_USER"):
        monkeypatch.setenv(name, "outer")
    values = of_process({"AXON_PS_JOB": "inner"})
    assert "RANK" not in values
    assert "AXON_PS_TOKEN" not in values
    assert (values["AXON_PS_JOB"], values["OF_THE_USER"]) == ("inner", "outer")
