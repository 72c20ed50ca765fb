"""The report of every benchmark: a table on the terminal, and a JSON file that describes the machine it ran on.

Owns: the description of the machine, the form of `benchmarks/results/*.json`, and the table.
Refuses: to identify the user. No host name, user or path gets into a file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
_PACKAGES = ("torch", "grpcio", "numpy", "numba")


def machine() -> dict[str, Any]:
    """Return the facts that a reader needs to compare numbers: processor, cores, memory, kernel and versions.

    Returns:
        `cpu` (model name), `cores` (that this process may use), `memory_gib`, `kernel`, `python`, and a version, or
        None, for each of torch, grpcio, numpy and numba.
    """
    return {
        "cpu": _after_colon(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int((_after_colon(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def write(name: str, rows: Sequence[Mapping[str, Any]], **extra: Any) -> Path:
    """Write `benchmarks/results/<name>.json`: the name, the machine, `extra`, and the rows.

    Args:
        name: name of the benchmark; the file's stem, which may be in a folder ("gpu/staging").
        rows: one mapping per measurement, column names with units ("median_ms").
        extra: further facts that a reader needs (sizes, repetitions, the systems compared).

    Returns:
        The file written.
    """
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"name": name, "machine": machine(), **extra, "rows": [dict(row) for row in rows]}
    path.write_text(dumped(content), encoding="utf-8")
    return path


def dumped(content: Mapping[str, Any]) -> str:
    """Return an object as JSON, in which each item, and each object of a list, has a line of its own."""
    items = {key: _rows(value) if isinstance(value, list) else _line(value) for key, value in content.items()}
    return "{\n" + ",\n".join(f"{_line(key)}: {value}" for key, value in items.items()) + "\n}\n"


def _rows(values: list[Any]) -> str:
    if not any(isinstance(value, dict) for value in values):
        return _line(values)
    return "[\n" + ",\n".join(map(_line, values)) + "\n]"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a title. Columns of numbers are aligned right. Floats have two decimals. None is a blank."""
    texts = [[_text(value) for value in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in texts), 0) for i, column in enumerate(columns)]
    numeric = [all(isinstance(row[i], (int, float, NoneType)) for row in rows) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        aligned = zip(values, widths, numeric, strict=True)
        return "  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in aligned).rstrip()

    print(f"\n{title}\n", line(columns), line(["-" * w for w in widths]), *map(line, texts), sep="\n", file=sys.stdout)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _after_colon(path: Path, key: str) -> str | None:
    """Return the value of the first "key : value" line of a file, if there is one."""
    if not path.exists():
        return None
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
