"""One target in a process of its own, guided by coverage: atheris instruments axon_ps, libFuzzer chooses the bytes.

If atheris does not exist for this Python, the choices come from a seed instead, as the report notes. The report is
written every second, since libFuzzer ends the process itself.

    python -m axon_ps_lab.fuzz.guided services REPORT.json --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

try:
    import atheris
except ImportError:
    atheris = None

import psutil

from axon_ps import kernels
from axon_ps_lab.fuzz.entropy import Entropy, GivenEntropy
from axon_ps_lab.fuzz.findings import Case, Findings, where
from axon_ps_lab.fuzz.priorities import give_way

PREFIXES: Final = (
    *("axon_ps.wire", "axon_ps.coordinator", "axon_ps.shard", "axon_ps.aggregation", "axon_ps.rpc", "axon_ps.storage"),
)
"""Coverage is of these packages, which read messages and files."""

REPLAYS: Final = 20
"""Most times that a file is sent until it is a finding: messages to several members arrive in any order."""

WARM_UP: Final = 0.1
"""Part of the time after which memory is measured first: by then everything has been compiled and cached."""


class FuzzTarget(Protocol):
    """Code that is fuzzed."""

    messages: int

    def run(self, entropy: Entropy) -> None:
        """Send a few messages."""


def target(name: str, findings: Findings, directory: str) -> Any:
    """Make a target by name; axon_ps is imported here, so that it is instrumented."""
    if name == "decoders":
        from axon_ps_lab.fuzz.targets.decoders import Decoders

        return Decoders(findings)
    if name == "worker":
        from axon_ps_lab.fuzz.targets.worker_half import WorkerHalf

        return WorkerHalf(findings)
    if name == "files":
        from axon_ps_lab.fuzz.targets.checkpoint_files import CheckpointFiles

        return CheckpointFiles(findings, directory)
    from axon_ps_lab.fuzz.targets.services import ServiceCalls

    return ServiceCalls(findings, directory)


class Run:
    """Runs a target until its time, or its budget of messages, is over.

    Args:
        made: the target.
        findings: its findings.
        report: the file of the report.
        seconds: the time; 0 = the budget counts alone.
        messages: the budget of messages; 0 = the time counts alone.
    """

    def __init__(self, made: Any, findings: Findings, report: Path, seconds: float, messages: int) -> None:
        self._target, self._findings, self._report = made, findings, report
        self._seconds, self._messages = seconds, messages
        self._began_s = self._written_s = time.monotonic()
        self._warm_mib = 0.0
        self._parent = os.getppid()
        self.inputs = 0

    @property
    def over(self) -> bool:
        """True if time or budget are used up, or the process that waits for this one has ended."""
        if os.getppid() != self._parent:
            return True
        done = time.monotonic() - self._began_s
        return bool(
            (self._seconds and done >= self._seconds) or (self._messages and self._target.messages >= self._messages)
        )

    def one(self, entropy: Entropy) -> None:
        """Run one input; an error that the target did not foresee is a finding, and closes the target."""
        try:
            self._target.run(entropy)
        except Exception as error:
            self._findings.add(f"the target: {where(error)}", [], "".join(traceback.format_exception(error))[-3000:])
            self._target.close()
        self.inputs += 1
        if time.monotonic() - self._written_s > 1.0:
            self.write()

    def write(self) -> None:
        """Write the report, as of now."""
        self._written_s = time.monotonic()
        took_s = self._written_s - self._began_s
        memory_mib = psutil.Process().memory_info().rss / 2**20
        fraction = max(took_s / self._seconds if self._seconds else 0.0, self._fraction_of_messages())
        if fraction < WARM_UP or not self._warm_mib:
            self._warm_mib = memory_mib
        made = self._target
        report = {
            "messages": made.messages,
            "inputs": self.inputs,
            "seconds": round(took_s, 1),
            "guided": atheris is not None,
            "warm_mib": round(self._warm_mib, 1),
            "memory_mib": round(memory_mib, 1),
            "ends": dict(getattr(made, "statuses", getattr(made, "ends", {}))),
            "jobs": getattr(made, "jobs", 0),
            "findings": {what: [count, self._findings.texts[what]] for what, count in self._findings.counts.items()},
        }
        written = self._report.with_suffix(".new")
        written.write_text(json.dumps(report, indent=1), encoding="utf-8")
        written.replace(self._report)

    def _fraction_of_messages(self) -> float:
        return self._target.messages / self._messages if self._messages else 0.0


def guided(run: Run, seed: int, cases: Path, end: Callable[[], None]) -> None:
    """Run libFuzzer's loop; it ends the process."""

    def one_input(data: bytes) -> None:
        run.one(GivenEntropy(data))
        if run.over:
            run.write()
            end()
            os._exit(0)  # libFuzzer takes every other way out for a crash

    cases.mkdir(parents=True, exist_ok=True)
    options = [f"-seed={seed + 1}", "-max_len=4096", "-len_control=0", "-timeout=120", "-rss_limit_mb=0"]
    options += ["-verbosity=0", f"-artifact_prefix={cases}/"]
    atheris.Setup([sys.argv[0], *options], one_input)
    atheris.Fuzz()


def seeded(run: Run, seed: int) -> None:
    """Run inputs without guidance."""
    while not run.over:
        run.one(Entropy(f"{seed}-{run.inputs}"))
    run.write()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("services", "decoders", "worker", "files"))
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unguided", action="store_true")
    parser.add_argument("--cases", type=Path, default=Path("build/fuzz"), help="where findings are written")
    parser.add_argument("--replay", type=Path, nargs="+", help="send what these files say, in this order, and no more")
    parser.add_argument("--give-way", type=int, default=0, help="to others of the machine, as of nice")
    options = parser.parse_args()
    options.cases, options.report = options.cases.absolute(), options.report.absolute()
    replay = [Case.read(path) for path in options.replay or ()]
    give_way(os.getpid(), options.give_way)
    findings = Findings(options.cases)
    guide = atheris is not None and not options.unguided and not replay
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(directory))  # files with relative names are written there
        if guide:
            loops = [module.name for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")]
            with atheris.instrument_imports(include=list(PREFIXES), exclude=loops):  # numba cannot compile those
                made = target(options.target, findings, directory)
        else:
            made = target(options.target, findings, directory)
        stack.callback(made.close)
        run = Run(made, findings, options.report, options.seconds, options.messages)
        if replay:
            for case in itertools.chain.from_iterable(itertools.repeat(replay, REPLAYS)):
                made.replay(case)
                if findings:
                    break
            run.write()
        elif guide:
            guided(run, options.seed, options.cases, stack.close)
        else:
            seeded(run, options.seed)
    print(findings)


if __name__ == "__main__":
    main()
