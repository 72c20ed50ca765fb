"""Run a campaign or a benchmark by its name: `make lab NAME=fuzz ARGS="--seconds 600"`; without a name, list them.

    python -m axon_ps_lab [NAME [ARGUMENT ...]]

Campaigns are in campaigns.toml, benchmarks are the scripts of benchmarks/. The exit code is that of the script.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_COMPONENTS: Final = ("_worker", "_rank", "_device", "_link")
"""Ends of the names of scripts that a benchmark starts."""

_EXTRAS: Final = {"integrations": "lightning"}
"""One library of each extra that campaigns need, by extra."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A campaign or a benchmark.

    Attributes:
        command: the arguments of Python: a script, or `-m pytest`, and its first arguments.
        does: its description, in a line.
        takes: its approximate time on two cores; empty = unknown.
        needs: its requirements on the machine; empty = none.
        extra: the extra of this package that it needs; empty = none.
    """

    command: Sequence[str]
    does: str
    takes: str = ""
    needs: str = ""
    extra: str = ""


def campaigns() -> dict[str, Campaign]:
    """Return the campaigns and benchmarks by name."""
    with (Path(__file__).parent / "campaigns.toml").open("rb") as file:
        found = {name: Campaign(**fields) for name, fields in tomllib.load(file).items()}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.stem not in found and '__name__ == "__main__"' in text and not path.stem.endswith(_COMPONENTS):
            script = path.relative_to(ROOT).as_posix()
            found[path.stem] = Campaign(
                command=(script,), does=(ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
            )
    return found


def run(name: str, campaign: Campaign, arguments: Sequence[str]) -> int:
    """Run a campaign in the root of the checkout, and return its exit code."""
    if campaign.extra and importlib.util.find_spec(_EXTRAS[campaign.extra]) is None:
        install = [sys.executable, "-m", "pip", "install", "-q", "-e", f".[torch,dev,examples,{campaign.extra}]"]
        print(f"{name} needs the extra {campaign.extra}: installing it", file=sys.stderr)
        subprocess.run(install, cwd=ROOT, env=os.environ | {"PIP_CONSTRAINT": "constraints.txt"}, check=True)
    return subprocess.call([sys.executable, *campaign.command, *arguments], cwd=ROOT)


def main(argv: Sequence[str]) -> int:
    """List the campaigns, or run one."""
    if not (ROOT / "benchmarks").is_dir():
        print("campaigns and benchmarks are scripts of a checkout of axon_ps; this is an installation", file=sys.stderr)
        return 2
    known = campaigns()
    if not argv or argv[0] not in known:
        for name, campaign in known.items():
            notes = "; ".join(filter(None, (campaign.takes, campaign.needs and f"needs {campaign.needs}")))
            print(f"{name:22} {campaign.does}" + (f" ({notes})" if notes else ""))
        if argv:
            print(f"there is no {argv[0]}; the names are above", file=sys.stderr)
        return 2 if argv else 0
    return run(argv[0], known[argv[0]], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
