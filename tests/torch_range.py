"""Run what touches PyTorch with several versions of it, each in an environment of its own.

    python tests/torch_range.py 2.11 2.15        make .venv-torch/2.11 and .venv-torch/2.15 where needed, and run

In each: the tests that touch torch, PyTorch's own collective tests over the backend "axon" (`torch_suite.py`) and the
demo. Other packages have the versions of constraints.txt. Needs nothing that is not in Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-torch"
UNPINNED = ("torch", "setuptools")
"""Not held at the versions of constraints.txt: what is varied, and what some of its versions need older."""

TOUCHES_TORCH = re.compile(r"\btorch\b|axon_ps\.parallel|\bexamples\b")
_IMPORTED = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)


@dataclass
class Report:
    """What came of one version.

    Attributes:
        version: torch's, as it calls itself.
        counts: how many tests passed, failed and were skipped; by what ran.
        reasons: why tests were skipped, and how many; what failed.
    """

    version: str
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return any(counts["failed"] for counts in self.counts.values())

    def __str__(self) -> str:
        lines = [f"torch {self.version}"]
        for what, counts in self.counts.items():
            lines.append(f"  {what:24s} " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
        return "\n".join([*lines, *(f"    {n:3d} × {reason}" for reason, n in self.reasons.most_common())])


def files_of_torch() -> list[Path]:
    """The test files that name torch, or import a module of the tests that does."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" not in path.parts]
    modules = {path.stem: path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")}

    def touches(path: Path, seen: frozenset[str] = frozenset()) -> bool:
        text = path.read_text()
        if TOUCHES_TORCH.search(text):
            return True
        others = {name for name in _IMPORTED.findall(text) if name in modules} - seen
        return any(touches(modules[name], seen | others) for name in others)

    return sorted(path for path in tests if touches(path))


def environment(version: str) -> Path:
    """The Python of an environment with this torch; made where it is not there or older than what it is made from."""
    directory = ENVIRONMENTS / version
    python, made = directory / "bin/python", directory / ".installed"
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    if made.exists() and all(made.stat().st_mtime > source.stat().st_mtime for source in sources):
        return python
    if not python.exists():
        venv.create(directory, with_pip=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = directory / "constraints.txt"
    pins.write_text("\n".join(line for line in lines if line.partition("==")[0] not in UNPINNED))
    wanted = [f"torch=={version}" + ("" if version.count(".") > 1 else ".*"), "-e", f"{ROOT}[torch,dev,examples]"]
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", pins, *wanted], check=True)
    made.touch()
    return python


def run(version: str, chosen: Sequence[str]) -> Report:
    """Run everything with one version."""
    python = environment(version)
    asked = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    report = Report(asked.stdout.strip() or f"{version}, which cannot be imported")
    for what, part in (("tests", run_tests), ("PyTorch's own tests", run_torch_suite), ("demo", run_demo)):
        if not chosen or what in chosen:
            begun = time.monotonic()
            report.counts[what] = part(python, report.reasons)
            print(f"{what} with torch {report.version}: {time.monotonic() - begun:.0f} s", flush=True)
    return report


def run_tests(python: Path, reasons: Counter[str]) -> Counter[str]:
    """The tests of ours."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        options = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", f"--junit-xml={file.name}"]
        subprocess.run([python, "-m", "pytest", *options, *files_of_torch()], cwd=ROOT)
        return counted(Path(file.name).read_text(), reasons)


def counted(junit: str, reasons: Counter[str]) -> Counter[str]:
    """The outcomes in a report of pytest's; a run without one has failed."""
    counts: Counter[str] = Counter()
    for case in ElementTree.fromstring(junit).iter("testcase") if junit else ():
        skipped, failed = case.find("skipped"), case.find("failure") is not None or case.find("error") is not None
        counts["failed" if failed else "passed" if skipped is None else "skipped"] += 1
        if failed:
            reasons[f"failed: {case.get('classname')}.{case.get('name')}"] += 1
        elif skipped is not None:
            reasons[f"skipped: {skipped.get('message', '')}"] += 1
    return counts or Counter(failed=1)


def run_torch_suite(python: Path, reasons: Counter[str]) -> Counter[str]:
    """PyTorch's."""
    command = [python, "tests/integration/torch_suite.py"]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    counts: Counter[str] = Counter()
    for line in ran.stdout.splitlines():
        if found := re.match(r"(passed|failed|skipped|not applicable) +[\d.]+ s  (\w+)", line):
            counts[found[1]] += 1
            if found[1] == "failed":
                reasons[f"failed: {found[2]}"] += 1
    return counts if ran.returncode == 0 or counts["failed"] else Counter(failed=1)


def run_demo(python: Path, reasons: Counter[str]) -> Counter[str]:
    """`make demo`, shorter."""
    command = [python.with_name("axon-ps"), "run", "--nproc-per-node", "2", "--shards", "2", "examples/train_gpt.py"]
    with tempfile.TemporaryDirectory() as directory:
        ran = subprocess.run([*command, "--steps", "20", "--out", directory], cwd=ROOT)
    if ran.returncode:
        reasons[f"failed: the demo, exit code {ran.returncode}"] += 1
    return Counter({"failed" if ran.returncode else "passed": 1})


def main(arguments: Sequence[str]) -> int:
    """Run the versions given; `--only tests` (or `demo`) a part of it."""
    chosen = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--only"]
    versions = [argument for argument in arguments if re.match(r"\d", argument)]
    reports = [run(version, chosen) for version in versions]
    print("", *reports, sep="\n")
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
