"""cli.settings: flags over environment over file over defaults; wrong values are errors that name where they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from axon_ps.cli import serve
from axon_ps.cli.settings import PREFIX, environment_report, load, state_directory
from axon_ps.errors import ConfigurationError
from axon_ps.observe.logging import LogStyle
from axon_ps.storage.state_store import EtcdStateStore
from axon_ps.worker.environment import worker_config


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_report():
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "axon.toml"
    file.write_text('job = "file"\ncoordinator = "file:1"\nlog = "json"\n')
    monkeypatch.setenv("AXON_PS_JOB", "environment")
    monkeypatch.setenv("AXON_PS_COORDINATOR", "environment:2")
    settings = load(file, job="flag", coordinator=None)
    assert (settings.job, settings.coordinator, settings.log) == ("flag", "environment:2", LogStyle.JSON)


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "axon.toml").write_text('job = "file"\n')
    monkeypatch.setenv("AXON_PS_CONFIG", str(tmp_path / "axon.toml"))
    assert load().job == "file"


def test_empty_variables_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXON_PS_JOB", "")
    monkeypatch.setenv("AXON_PS_TOKEN_FILE", "")
    assert load().job == "default"
    assert load().resolved_token == ""


def test_the_token_may_be_in_a_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret-token\n")
    settings = load(token_file=tmp_path / "token")
    assert settings.resolved_token == "s3cret-token"
    assert "s3cret" not in repr(load(token="s3cret-token"))
    assert settings.security().tokens() == ("s3cret-token",)


def test_the_observers_token_goes_to_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("r3ad-only\n")
    monkeypatch.setenv("AXON_PS_OBSERVER_TOKEN_FILE", str(tmp_path / "token"))
    settings = load(token="t")
    assert settings.security().observer_token == "r3ad-only"
    assert settings.environment(token="t")["AXON_PS_OBSERVER_TOKEN"] == "r3ad-only"
    assert "r3ad" not in repr(settings.security())
    monkeypatch.setenv("AXON_PS_OBSERVER_TOKEN", "r3ad")
    assert environment_report()["AXON_PS_OBSERVER_TOKEN"] == "(set, not shown)"


def test_workers_read_the_environment_that_is_passed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ca.pem", "c.pem", "k.pem"):
        (tmp_path / name).touch()
    settings = load(job="j", tls_ca="ca.pem", tls_cert="c.pem", tls_key="k.pem", node="n", checkpoint_dir="/c")
    config = worker_config({**settings.environment(token="t"), "AXON_PS_COORDINATOR": "host:7"})
    assert (config.job, config.node, config.security.token) == ("j", "n", "t")
    assert (config.security.ca_file, config.security.cert_file, config.security.key_file) == (
        "ca.pem",
        "c.pem",
        "k.pem",
    )


def test_the_report_hides_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXON_PS_TOKEN", "s3cret")
    assert environment_report()["AXON_PS_TOKEN"] == "(set, not shown)"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"coordinator": "nowhere"}, "--coordinator is 'nowhere': it must be host:port"),
        ({"coordinator": "here:7077,nowhere"}, "or several with commas between them"),
        ({"coordinator": "host:99999"}, "--coordinator is 'host:99999'"),
        ({"log_level": "loud"}, "--log-level is 'loud'"),
        ({"log": "pretty"}, "--log is 'pretty'"),
        ({"job": ""}, "--job is ''"),
        ({"config": Path("/no/such/file.toml")}, "/no/such/file.toml does not exist"),
    ],
)
def test_wrong_values_name_the_flag(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(**flags)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_wrong_values_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXON_PS_COORDINATOR", "nowhere")
    with pytest.raises(ConfigurationError, match="AXON_PS_COORDINATOR is 'nowhere'"):
        load()


@pytest.mark.parametrize(
    ("text", "words"),
    [("joob = 'x'\n", "sets 'joob', which is no setting of axon-ps; is 'job' meant?"), ("job = \n", "cannot be read")],
)
def test_a_file_with_mistakes_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "axon.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        load(tmp_path / "axon.toml")


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--token-file is '.*none', and there is no such file"):
        load(token_file=tmp_path / "none")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        _ = load(token_file=tmp_path).resolved_token
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        _ = load(token_file=tmp_path / "empty").resolved_token


def test_plugins_are_modules_that_services_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for name in ("plugin_one", "plugin_two"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setenv("AXON_PS_PLUGINS", "plugin_one, plugin_two")
    assert load().environment(token="")["AXON_PS_PLUGINS"] == "plugin_one, plugin_two"
    load().load_plugins()
    assert sys.modules.pop("plugin_one")
    assert sys.modules.pop("plugin_two")
    load(plugins="").load_plugins()  # the flag wins
    assert "plugin_one" not in sys.modules
    with pytest.raises(ConfigurationError, match="plugin 'plugin_three' cannot be imported"):
        load(plugins="plugin_three").load_plugins()


def test_settings_of_servers_in_a_file_reach_the_services_of_run(tmp_path: Path) -> None:
    file = tmp_path / "axon_ps.toml"
    file.write_text("drain_s = 30\ntls_mutual = true\n")
    passed = load(config=file).environment(token="")
    assert (passed["AXON_PS_DRAIN_S"], passed["AXON_PS_TLS_MUTUAL"]) == ("30", "1")


def test_several_coordinators_have_commas_between_them() -> None:
    assert load(coordinator="a:7077, b:7077").coordinator == "a:7077, b:7077"


@pytest.mark.parametrize(
    ("state", "prefix"),
    [
        ("etcd:n0:2379,n1:2379", "/axon_ps/gpt"),
        ("etcd:n0:2379?ttl=5", "/axon_ps/gpt"),
        ("etcd:n0:2379/mine/", "/mine"),
    ],
)
def test_every_job_has_keys_of_its_own_in_etcd(state: str, prefix: str) -> None:
    with serve._state_store(state, "gpt") as store:
        assert isinstance(store, EtcdStateStore)
        assert store._at.prefix == prefix


def test_where_state_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert state_directory() == Path("/elsewhere/axon-ps")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_directory() == Path.home() / ".local/state/axon-ps"
    monkeypatch.setattr(Path, "home", _no_home)
    assert state_directory() == Path("/var/lib/axon-ps"), "a user without a home: then who starts it says where"


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
