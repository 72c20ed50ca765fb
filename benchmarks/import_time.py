"""Time of `import axon_ps` beyond `import numpy, grpc`, and the part of axon_ps in `import torch`.

Each is measured in a fresh interpreter. torch loads axon_ps's entry point at the end of its own import. The entry point
is timed by itself, since the time of `import torch` varies by more than that. The work that it defers is timed, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from axon_ps_lab import report

STATEMENTS = {
    "numpy + grpc": ("", "import numpy, grpc"),
    "axon_ps": ("", "import numpy, grpc, axon_ps"),
    "torch": ("", "import torch"),
    "our part of torch": ("import torch", "from axon_ps_torch import autoload; autoload()"),
    "what that defers": ("import torch", "import axon_ps.parallel"),
}
"""By name, the statement that runs before, and the statement that is timed."""
MEASURE = "import time; {}; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
UNWANTED = ("torch", "cupy", "numba")


def seconds(before: str, statement: str) -> float:
    """Return the seconds of `statement` in its own interpreter, in which torch loads no entry points by itself."""
    program = MEASURE.format(before or "pass", statement)
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def unwanted_modules() -> list[str]:
    """Return the heavy modules that `import axon_ps` loads; there should be none."""
    script = f"import axon_ps, sys; print(*[m for m in {UNWANTED!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    options = parser.parse_args()
    times_s: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(3 if options.quick else options.rounds):
        for name, (before, statement) in STATEMENTS.items():
            times_s[name].append(seconds(before, statement))
    median_s = {name: statistics.median(t) for name, t in times_s.items()}
    extra_s = median_s["axon_ps"] - median_s["numpy + grpc"]
    rows = [{"what": name, "median_s": round(t, 4)} for name, t in median_s.items()]
    rows.append({"what": "axon_ps alone", "median_s": round(extra_s, 4)})
    report.table("Import time", ("what", "median_s"), [[row["what"], row["median_s"]] for row in rows])
    report.write("import_time", rows, unwanted_modules=unwanted_modules(), times_s=times_s)


if __name__ == "__main__":
    main()
