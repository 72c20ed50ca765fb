"""Every argument that names something to read: where that is not there, the command says so, by name, and fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from axon_ps.cli import main as cli
from axon_ps.cli.main import main
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.storage.roots import allow_roots

AT = ("--coordinator", "127.0.0.1:1")
COMMANDS: Mapping[str, Sequence[str]] = {
    "run": ("SCRIPT",),
    "coordinator": ("--port", "0", "--state", "memory"),
    "shard": (*AT, "--port", "0"),
    "proxy": (*AT, "--port", "0"),
    "status": AT,
    "top": AT,
    "logs": AT,
    "trace": AT,
    "drain": ("0", *AT),
    "release": ("m", *AT),
    "health": ("127.0.0.1:1",),
    "doctor": (),
    "simulate": ("SCENARIO",),
    "checkpoint save": ("/c", *AT),
    "checkpoint restore": ("/c", *AT),
    "checkpoint ls": (),
    "checkpoint export": (),
    "checkpoint verify": (),
    "auth init": ("OUT",),
    "auth issue": ("OUT", "--role", "worker"),
    "auth token": ("--role", "worker"),
    "auth show": (),
    "auth revoke": ("x", *AT),
    "auth table": (),
    "chaos run": ("x.toml",),
}
"""The other arguments of each command, before the one that names a file."""

POSITIONAL = {("simulate", "scenario"), ("checkpoint ls", "uri"), ("checkpoint export", "uri"),
              ("checkpoint verify", "uri"), ("auth show", "file"), ("chaos run", "file"),
              ("run", "program")}  # fmt: skip
WRITTEN = {("run", "checkpoint_dir"), ("run", "state"), ("coordinator", "state"), ("coordinator", "checkpoint_dir"),
           ("trace", "output"), ("simulate", "plot"), ("checkpoint save", "uri"), ("auth init", "file"),
           ("auth init", "authority"), ("auth token", "out"), ("auth issue", "directory"), ("chaos run", "out"),
           ("doctor", "measure")}  # fmt: skip
"""Arguments that name what a command writes, or makes where it is not there yet."""
BY_OTHERS = {("checkpoint restore", "uri"), ("coordinator", "trust_checkpoint")}
"""Read by the coordinator, on its machine; a trusted checkpoint is one that may be named by a request one day."""
WORDS = ("uri", "file", "dir", "resume", "like", "profile", "tls_ca", "tls_cert", "tls_key", "trust_checkpoint",
         "state", "authority")  # fmt: skip


def commands(app: typer.Typer, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command, by all of its name."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield f"{before}{command.name or command.callback.__name__}", command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{before}{group.name} ")


def named_files() -> Iterator[tuple[str, str]]:
    """Every command's parameters that name a file or a directory."""
    for name, function in commands(cli.application()):
        for parameter in inspect.signature(function).parameters.values():
            what = parameter.name
            if "Path" in str(parameter.annotation) or what in WORDS or what.endswith(("_file", "_dir", "program")):
                yield name, what


@pytest.fixture
def roots_of_this_process() -> Iterator[None]:
    """A service allows the checkpoints of its process, which is the other tests', too."""
    yield
    allow_roots(None)


READ = [one for one in named_files() if one not in WRITTEN | BY_OTHERS]


@pytest.mark.usefixtures("roots_of_this_process")
@pytest.mark.parametrize(("command", "parameter"), READ, ids=[f"{c} {p}" for c, p in READ])
def test_what_is_not_there_is_named(
    command: str, parameter: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("axon_ps.observe.logging.configure", lambda *_, **__: None)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "scenario.toml").write_text("[model]\nblocks = 1\nblock_numel = 8\n[[workers]]\ncompute_s = 1\n")
    given = {"SCRIPT": "train.py", "SCENARIO": "scenario.toml", "OUT": "out"}
    rest = [str(tmp_path / given[each]) if each in given else each for each in COMMANDS[command]]
    missing = str(tmp_path / "nowhere" / "it")
    if (command, parameter) in POSITIONAL:
        argument = [missing]
        rest = []
    elif (command, parameter) == ("checkpoint export", "like"):
        argument = [str(tmp_path), "out/", "--like", missing]
    elif command == "checkpoint verify":
        argument = [str(tmp_path), f"--{parameter.replace('_', '-')}", missing]
    else:
        argument = [f"--{parameter.replace('_', '-')}", missing]
    assert main([*command.split(), *argument, *rest]) == 2
    said = capfd.readouterr().err
    assert missing in said, said
    assert "Traceback" not in said


def test_every_argument_that_names_a_file_is_known() -> None:
    assert set(named_files()) >= POSITIONAL | WRITTEN | BY_OTHERS, "a row is of an argument that is gone"


@pytest.mark.usefixtures("roots_of_this_process")
@pytest.mark.parametrize(("resume", "wanted"), [("auto", ""), ("auto/", "auto"), ("other", "other")])
def test_a_coordinator_resumes_from_the_newest_checkpoint_if_told_so(
    resume: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is not a path; `auto/` is."""
    found: list[CoordinatorConfig] = []
    monkeypatch.setattr("axon_ps.observe.logging.configure", lambda *_, **__: None)
    monkeypatch.setattr("axon_ps.coordinator.server.server.serve", lambda config, *_: found.append(config))
    monkeypatch.setattr("axon_ps.cli.serve._in_foreground", lambda start, *_: start(None, None) or 0)
    monkeypatch.chdir(tmp_path)
    options = ["--port", "0", "--state", "memory", "--checkpoint-dir", str(tmp_path), "--resume", resume]
    assert main(["coordinator", *options]) == 0
    assert found[0].resume.rstrip("/") == (str(tmp_path / wanted) if wanted else "")
