"""Run every benchmark, one after the other: `make bench`. Arguments go to each of them (`--quick`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = (
    "import_time",
    "kernels",
    "coordinator_decision",
    "members",
    "data_plane",
    "tls_cost",
    "collectives",
    "collectives_netns",
    "whole_step",
    "whole_step --one-host",
    "unequal",
    "overlap",
    "simulator",
    "ddp",
    "pipeline",
    "restart",
    "checkpoint_steps",
)


def main() -> int:
    """Run the benchmarks; returns 1 if one failed."""
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        module, *options = name.split()
        if subprocess.run([sys.executable, str(HERE / f"{module}.py"), *options, *sys.argv[1:]]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
