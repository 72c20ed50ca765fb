"""deploy/systemd: systemd reads the units (where it is installed), and the command line understands what they start."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from axon_ps.cli.serve import DRAIN_S
from parsed_commands import understood

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))
INSTALLED = "/opt/axon-ps/bin/"


def service(unit: Path) -> dict[str, str]:
    """The section [Service]; of a name that is there twice, the last."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_it_is_confined_and_ends_in_time(unit: Path) -> None:
    section = service(unit)
    assert (section["NoNewPrivileges"], section["ProtectSystem"], section["Restart"]) == ("yes", "strict", "on-failure")
    drain = re.search(r"^Environment=AXON_PS_DRAIN_S=(\d+)$", unit.read_text(), re.M)
    assert int(section["TimeoutStopSec"]) > (int(drain[1]) if drain else 0) + DRAIN_S


@pytest.mark.parametrize("name", ["axon-ps-coordinator.service", "axon-ps-shard@.service"])
def test_the_command_line_understands_it(name: str) -> None:
    (unit,) = [u for u in UNITS if u.name == name]
    program, *arguments = service(unit)["ExecStart"].split()
    assert program == f"{INSTALLED}axon-ps"
    assert arguments.pop() == "$OPTIONS"
    understood(arguments)


if shutil.which("systemd-analyze"):

    def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
        copies = []
        for unit in UNITS:
            copies.append(tmp_path / unit.name.replace("@", "@0"))
            copies[-1].write_text(unit.read_text().replace(INSTALLED, f"{Path(sys.executable).parent}/"))
        done = subprocess.run(["systemd-analyze", "verify", *copies], capture_output=True, text=True)
        ours = [line for line in done.stderr.splitlines() if "axon-ps" in line]
        assert (done.returncode, ours) == (0, [])
