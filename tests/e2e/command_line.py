"""Running `axon-ps` as a user does, for the tests beside this file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from deadlines import WHOLE_S

AXON_PS = (sys.executable, "-m", "axon_ps.cli.main")


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """Our environment without anything of ours, and `values`."""
    return {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")} | dict(values)


def axon_ps(*arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with some environment variables."""
    command = [*AXON_PS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_S, env=environment(values))
