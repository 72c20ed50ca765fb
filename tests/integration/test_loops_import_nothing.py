"""No event loop of the command line is held by an import: commands import what they need before their loop runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps.testing import LocalCluster

RUN = """
import asyncio, sys

def seen(event, arguments):
    if event == "import" and asyncio._get_running_loop() is not None:
        print(arguments[0], file=found)

with open(sys.argv.pop(1), "w", buffering=1) as found:
    sys.addaudithook(seen)
    from axon_ps.cli.main import main
    sys.exit(main(sys.argv[1:]))
"""
"""Runs a command, and writes the names of modules that are imported while an event loop runs."""

ALLOWED = {"rich._emoji_codes": "a table, which rich imports at the first text that may have an emoji: 2 ms"}
"""Modules that may be imported then, besides those of Python itself, and why."""

COMMANDS = (
    "status",
    "status --json",
    "top",
    "logs",
    "health ADDRESS",
    "doctor",
    "drain 0",
    "release none",
    "trace --timeout-s 0.1",
    "checkpoint save TMP/saved",
    "checkpoint restore TMP/none",
    "auth revoke worker/7",
)

SERVICES = (
    "coordinator --port 0 --http-port 0 --world-size 1 --shards 1 --state memory:",
    "shard --port 0 --http-port 0",
    "proxy --port 0",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=1) as cluster:
        yield cluster


def imported(found: Path) -> list[str]:
    """The modules that a command has imported in its loop, and should not have."""
    names = found.read_text().split()
    return [n for n in names if n not in ALLOWED and n.partition(".")[0] not in sys.stdlib_module_names]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_nothing_in_its_loop(command: str, cluster: LocalCluster, tmp_path: Path) -> None:
    found = tmp_path / "found"
    words = command.replace("ADDRESS", cluster.address).replace("TMP", str(tmp_path)).split()
    subprocess.run([sys.executable, "-c", RUN, str(found), *words], env=cluster.env(0), timeout=50.0)
    assert imported(found) == []


@pytest.mark.parametrize("command", SERVICES)
def test_a_service_imports_nothing_in_its_loop(command: str, cluster: LocalCluster, tmp_path: Path) -> None:
    found = tmp_path / "found"
    line = [sys.executable, "-c", RUN, str(found), *command.split()]
    with subprocess.Popen(line, env=cluster.env(0), stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        said = next((text for text in service.stderr if "listening on" in text), "")
        service.kill()
    assert said
    assert imported(found) == []


def test_a_launch_imports_nothing_in_its_loop(tmp_path: Path) -> None:
    found, script = tmp_path / "found", tmp_path / "script.py"
    script.write_text("print('done')")
    subprocess.run([sys.executable, "-c", RUN, str(found), "run", "--http-port", "0", str(script)], timeout=50.0)
    assert imported(found) == []
