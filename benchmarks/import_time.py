"""How long `import axon_ps` takes beyond `import numpy, grpc`, each in fresh interpreters, in turns."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import _report

PEERS = {"numpy + grpc": "import numpy, grpc", "axon_ps": "import numpy, grpc, axon_ps"}
MEASURE = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
UNWANTED = ("torch", "cupy", "numba")


def seconds(statement: str) -> float:
    """Seconds of `statement` in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE.format(statement)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def unwanted_modules() -> list[str]:
    """Which of the heavy modules `import axon_ps` brings in; there should be none."""
    script = f"import axon_ps, sys; print(*[m for m in {UNWANTED!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    options = parser.parse_args()
    times_s: dict[str, list[float]] = {name: [] for name in PEERS}
    for _ in range(3 if options.quick else options.rounds):
        for name, statement in PEERS.items():
            times_s[name].append(seconds(statement))
    median_s = {name: statistics.median(t) for name, t in times_s.items()}
    extra_s = median_s["axon_ps"] - median_s["numpy + grpc"]
    rows = [{"what": name, "median_s": round(t, 4)} for name, t in median_s.items()]
    rows.append({"what": "axon_ps alone", "median_s": round(extra_s, 4)})
    _report.table("Import time", ("what", "median_s"), [[row["what"], row["median_s"]] for row in rows])
    _report.write("import_time", rows, unwanted_modules=unwanted_modules(), times_s=times_s)


if __name__ == "__main__":
    main()
