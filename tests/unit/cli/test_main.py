"""cli.main: exit codes, one red line for an error, and mistakes that are found before anything is started.

Tests of `cli/checkpoint.py`, `cli/doctor.py` and `cli/options.py`.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import typer

from axon_ps import __version__
from axon_ps.cli import main as cli
from axon_ps.cli.launch import run
from axon_ps.cli.main import main
from axon_ps.errors import AxonError, Unreachable
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.manifest import FileEntry, Manifest, write_manifest
from axon_ps.types import DType

SECRET = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR", "TOKEN", "TOKEN_FILE", "JOB", "INSECURE", "CONFIG"):
        monkeypatch.delenv(f"AXON_PS_{name}", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def complaint(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line printed for a user's mistake."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("axon-ps: ")
    assert err.count("\n") == 1
    return err


def example_manifest(version: int) -> Manifest:
    """Of a checkpoint of one small unit."""
    layout = Layout(units=(build_unit("block", [("weight", (8,), DType.F32)]),))
    files = (FileEntry(name="shard-0", sha256="0" * 64, bytes=32),)
    return Manifest(
        job="default", version=version, layout=layout, optimizer=None, num_servers=1, options=PlanOptions(), files=files
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"axon-ps {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["run"],
        ["coordinator"],
        ["shard"],
        ["status"],
        ["health"],
        ["doctor"],
        ["checkpoint"],
        ["checkpoint", "save"],
    ],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "Usage: axon-ps" in capsys.readouterr().out


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--colour"]) == 2
    assert "--colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no-such-file.py"], "the script 'no-such-file.py' does not exist"),
        (["run", "package.module"], "give a module as -m NAME"),
        (["run", "--shards", "0", "SCRIPT"], "--shards is 0"),
        (["run", "--nnodes", "2", "SCRIPT"], "needs the same secret on each"),
        (["run", "--nnodes", "2", "--node-rank", "2", "--token", "t", "SCRIPT"], "--node-rank is 2 and --nnodes 2"),
        (["run", "--standby", "1", "--max-restarts", "0", "SCRIPT"], "--standby is 1, but --max-restarts 0"),
        (["run", "--min-workers", "3", "SCRIPT"], "--min-workers is 3; the job has 1 workers"),
        (["run", "--resume", "auto", "SCRIPT"], "newest checkpoint of --checkpoint-dir"),
        (["run", "--coordinator", "h:1", "--resume", "x", "SCRIPT"], "are the coordinator's"),
        (
            ["run", "--coordinator", "h:1", "--resume", "auto", "--checkpoint-dir", "/", "SCRIPT"],
            "are the coordinator's",
        ),
        (["run", "--resume", "/no/such/checkpoint", "SCRIPT"], "complete checkpoint at /no/such/checkpoint"),
        (["run", "--coordinator", "h", "SCRIPT"], "--coordinator is 'h': it must be host:port"),
        (["status"], "which coordinator?"),
        (["shard"], "a shard server needs its coordinator"),
        (["shard", "--coordinator", "h:1", "--host", "0.0.0.0"], "needs a secret of the job"),
        (["coordinator", "--host", "10.1.2.3", "--token", "t"], "can be guessed"),
        (["coordinator", "--tls-cert", "SCRIPT"], "without key_file"),
        (["coordinator", "--shards", "0", "--state", "memory"], "num_shards is 0"),
        (["coordinator", "--resume", "auto", "--state", "memory"], "the newest checkpoint of --checkpoint-dir"),
        (["checkpoint", "save", "/c", "--coordinator", "h:1", "--extra", "[]"], "must be a JSON object"),
        (["checkpoint", "save", "/c", "--coordinator", "h:1", "--extra", "{"], "--extra is not JSON"),
        (["checkpoint", "verify", "/no/such/checkpoint"], "/no/such/checkpoint"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint([script if a == "SCRIPT" else a for a in arguments], capsys)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "nobody answers there"),
        ("-", "is not host:port"),
        (f"{'a' * 64}:7077", "no host can have the name"),
    ],
)
def test_the_doctor_checks_the_coordinator_it_is_given(
    address: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--coordinator", address, "--json"]) == 1
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["coordinator"]["found"] == address
    assert words in found["coordinator"]["problem"]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "no token, no TLS"),
        ({"TOKEN": "guessed"}, "a token, no TLS"),
        ({"TOKEN": SECRET}, "a token, TLS by the job's own authority beyond loopback"),
        ({"TOKEN_FILE": "{file}"}, "a token of {file}, TLS by the job's own authority beyond loopback"),
        ({"TOKEN_FILE": "{file}", "TLS": "1"}, "a token of {file}, TLS by the job's own authority"),
        ({"TLS_CA": "ca.pem"}, "no token, TLS by certificates in files"),
    ],
)
def test_the_doctor_finds_the_token_and_tls_wherever_they_are_given(
    variables: dict[str, str],
    found: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").touch()
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    for name, value in variables.items():
        monkeypatch.setenv(f"AXON_PS_{name}", value.format(file=file))
    main(["doctor", "--json"])
    said = {f["what"]: f["found"] for f in json.loads(capsys.readouterr().out)}
    assert said["security"] == found.format(file=file)


@pytest.mark.parametrize(("there", "words"), [(False, "there is no such directory"), (True, "no manifest.json in it")])
def test_listing_no_checkpoints_is_an_error(
    there: bool, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path if there else tmp_path / "nothing"
    assert words in complaint(["checkpoint", "ls", str(directory)], capsys)
    assert main(["checkpoint", "ls", "--json", str(directory)]) == 2
    assert json.loads(capsys.readouterr().out) == []


def test_a_damaged_checkpoint_is_not_left_out_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{")
    assert main(["checkpoint", "ls", str(tmp_path)]) == 2
    assert "step-1 is passed over: " in caplog.text


def test_resuming_from_what_there_may_be_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--resume", "auto", "--checkpoint-dir", str(tmp_path / "made-later"), script]
    assert launched(monkeypatch, arguments).resume == ""
    assert capsys.readouterr().err == (
        f"axon-ps: --resume auto: there is no complete checkpoint at {tmp_path}/made-later: there is no such "
        "directory; the job begins anew\n"
    )
    write_manifest(str(tmp_path / "made-later" / "step-7"), example_manifest(7))
    assert launched(monkeypatch, arguments).resume == f"{tmp_path}/made-later/step-7"
    assert capsys.readouterr().err == f"axon-ps: --resume auto: {tmp_path}/made-later/step-7, version 7\n"
    (tmp_path / "made-later" / "step-7" / "manifest.json").write_text("{")
    assert main(["run", *arguments]) == 1
    assert "none of the 1 checkpoints in" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_a_line_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "v7\x1b[31m"
    damaged.mkdir()
    (damaged / "manifest.json").write_bytes(b"[" * 100_000)
    (tmp_path / "v8").mkdir()
    (tmp_path / "v8" / "manifest.json").write_text('{"format_version": 4, "num_servers": 4294967295}')
    for uri, words in (
        (damaged, "v7\\x1b[31m/manifest.json is damaged: it has more than 400 lists"),
        (tmp_path / "v8", "v8/manifest.json is damaged: units are cut over 4294967295 servers"),
    ):
        for command in (["ls"], ["verify", "--no-progress"], ["export", "--no-progress"]):
            assert main(["checkpoint", *command, str(uri)]) == (2 if command == ["ls"] else 1)
            out, err = capsys.readouterr()
            assert out == ""
            assert "Traceback" not in err
            line = err.splitlines()[-1]
            assert words in line
            assert line.isprintable()


def test_a_second_node_leaves_resuming_to_the_first(
    monkeypatch: pytest.MonkeyPatch, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--nnodes", "2", "--node-rank", "1", "--token", "4f7c1a90d2e85b36af01xyz", "--master-addr", "n0"]
    assert launched(monkeypatch, [*nodes, "--resume", "/of/node/0", script]).resume == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("words", "found"), [("axon-ps sta", "status"), ("axon-ps checkpoint ver", "verify")])
def test_the_shell_completes_commands(words: str, found: str) -> None:
    variables = {"_AXON_PS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", "import sys; from axon_ps.cli.main import main; sys.exit(main([]))"]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert ran.stdout.split() == [found]


def test_other_errors_exit_with_1_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise Unreachable("nobody answers at h:1")

    monkeypatch.setattr("axon_ps.cli.terminal.live.client", fail)
    assert main(["status", "--coordinator", "h:1"]) == 1
    assert capsys.readouterr().err == "axon-ps: nobody answers at h:1\n"
    assert main(["--debug", "status", "--coordinator", "h:1"]) == 1
    assert "Traceback (most recent call last):" in capsys.readouterr().err
    assert main(["status", "--coordinator", "h:1"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("axon_ps.cli.settings.load", fail)
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def launched(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> run.Launch:
    """What `axon-ps run` would have performed."""
    seen: list[run.Launch] = []

    async def perform(launch: run.Launch, _: object) -> int:
        seen.append(launch)
        return 0

    monkeypatch.setattr("axon_ps.cli.launch.perform.perform", perform)
    assert main(["run", *arguments]) == 0
    return seen[0]


def test_what_follows_the_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    launch = launched(monkeypatch, ["--nproc_per_node", "2", script, "--shards", "9", "-m", "--help"])
    assert launch.program == (script, "--shards", "9", "-m", "--help")
    assert (launch.nproc_per_node, launch.shards, launch.world_size) == (2, 1, 2)


def test_standbys_are_for_restarts(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    assert launched(monkeypatch, [script]).max_restarts == 0
    assert launched(monkeypatch, ["--standby", "2", script]).max_restarts == 2
    assert launched(monkeypatch, ["--standby", "2", "--max-restarts", "5", script]).max_restarts == 5


def test_a_module_runs_as_python_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, ["-m", "package.train", "--lr", "1"]).program == ("-m", "package.train", "--lr", "1")


def test_every_run_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tokens = {launched(monkeypatch, [script]).token for _ in range(2)}
    assert len(tokens) == 2
    assert all(len(token) >= 32 for token in tokens)
    assert launched(monkeypatch, ["--token", "mine", script]).token == "mine"


@pytest.mark.parametrize(
    ("arguments", "master_port", "coordinator_port"),
    [
        ([], 0, 0),
        (["--master-port", "4000"], 4000, 4001),
        (["--coordinator-port", "5000"], 0, 5000),
        (
            ["--nnodes", "2", "--node-rank", "1", "--token", "4f7c1a90d2e85b36af01xyz", "--master-addr", "n0"],
            29500,
            29501,
        ),
    ],
)
def test_ports(
    arguments: list[str], master_port: int, coordinator_port: int, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    launch = launched(monkeypatch, [*arguments, script])
    assert (launch.master_port, launch.coordinator_port) == (master_port, coordinator_port)


def test_nodes_share_the_shard_servers(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    here = [
        launched(
            monkeypatch,
            ["--nnodes", "2", "--node-rank", str(r), "--shards", "3", "--token", "4f7c1a90d2e85b36af01xyz", script],
        ).shards_here
        for r in range(2)
    ]
    assert here == [2, 1]


def test_with_a_coordinator_elsewhere_nothing_is_embedded(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    launch = launched(monkeypatch, ["--coordinator", "h:1", "--nnodes", "2", script])
    assert (launch.shards, launch.node_rank, launch.token) == (0, -1, "")


def test_unknown_errors_are_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AxonError("two\nlines")

    monkeypatch.setattr("axon_ps.cli.settings.load", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "axon-ps: two lines\n"


def commands(app: typer.Typer) -> Iterator[Callable[..., object]]:
    """The functions of an application's commands."""
    yield from (command.callback for command in app.registered_commands if command.callback is not None)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


@pytest.mark.parametrize("command", [*commands(cli.application())], ids=lambda command: command.__name__)
def test_every_option_of_a_command_has_an_effect(command: Callable[..., object]) -> None:
    """`--drain-s` of a shard server had none: it was in the help, and nobody read it."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(command)))).body
    assert isinstance(function, ast.FunctionDef)
    read = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    options = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    assert [name for name in options if name not in read] == []
