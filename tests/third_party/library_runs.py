"""Example scripts of other people's libraries, over axon_ps and, with the lines that we changed undone, over gloo."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
WORKER = Path(__file__).with_name("library_worker.py")
MOST_CHANGED = 2
"""Lines of a library's own example that may be other."""

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

_CHANGED = re.compile(r"^(\s*)(\S.*?)  # was: ?(.*)$")


def plain(script: Path) -> tuple[str, int]:
    """The script as it was for the library, and how many lines are other: those with `# was: the line before`."""
    lines, changed = [], 0
    for line in script.read_text().splitlines():
        if found := _CHANGED.match(line):
            changed += 1
            line = found[1] + found[3] if found[3] else ""
        lines.append(line)
    return "\n".join(lines) + "\n", changed


def run(
    script: str, runs: Sequence[Sequence[object]], directory: Path, *, gloo: bool = False, flags: Sequence[str] = ()
) -> str:
    """Call the `main` of a script with each of these arguments, in two processes; what they printed.

    Args:
        script: its name.
        runs: arguments of each call, which all happen in the same processes.
        directory: where they run.
        gloo: whether over gloo, as the script was before our changes; torchrun starts it then.
        flags: of `axon-ps run`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = EXAMPLES / script
    if gloo:
        path = directory / script
        path.write_text(plain(EXAMPLES / script)[0])
    plan = json.dumps({"script": str(path), "path": str(EXAMPLES), "runs": [[str(a) for a in args] for args in runs]})
    launcher = (
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
        if gloo
        else ["-m", "axon_ps.cli.main", "run", "--nproc-per-node", "2", "--shards", "2", *flags]
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), plan],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def losses(directory: Path) -> list[float]:
    """What a script has written into a directory: the losses, one for each batch or step."""
    found = json.loads((directory / "losses.json").read_text())
    return [entry["loss"] if isinstance(entry, dict) else entry for entry in found if _is_loss(entry)]


def _is_loss(entry: object) -> bool:
    return "loss" in entry if isinstance(entry, dict) else True


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference, relative to the larger of both."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    assert all(map(math.isfinite, ours))
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(ours, theirs, strict=True))


def report(library: str, rows: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Print the table of losses; the largest relative difference of each run, by its name."""
    differences = {}
    for name, ours, theirs in rows:
        differences[name] = largest_difference(ours, theirs)
        print(
            f"{library:12} {name:16} steps {len(ours):3}  last loss axon {ours[-1]:.7f}  gloo {theirs[-1]:.7f}  "
            f"largest difference {differences[name]:.1e}"
        )
    return differences


@contextlib.contextmanager
def running(script: str, arguments: Sequence[object], directory: Path) -> Iterator[Running]:
    """A script in two processes beside two shard servers, to kill some of them; a worker that dies is started again."""
    directory.mkdir(parents=True, exist_ok=True)
    flags = ["--nproc-per-node", "2", "--shards", "2", "--max-restarts", "3"]
    command = ["-m", "axon_ps.cli.main", "run", *flags, str(EXAMPLES / script), *map(str, arguments)]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)


class Running:
    """A run that is under way.

    Args:
        process: `axon-ps run`.

    Attributes:
        output: the lines that it has printed so far.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output: list[str] = []

    def read_until(self, pattern: str, count: int = 1) -> None:
        """Wait for so many lines that match, from now on."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            count -= bool(re.search(pattern, line))
            if not count:
                return
        raise AssertionError(f"it ended before {pattern!r}:\n{''.join(self.output)[-8000:]}")

    def kill(self, *words: str, **environment: str) -> None:
        """Kill a process of the run whose command line has these words, and its environment these values."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if set(words) <= set(child.cmdline()) and environment.items() <= child.environ().items():
                child.kill()
                return
        raise AssertionError(f"no process has {words} and {environment}")

    def end(self) -> str:
        """Wait for its end; all that it has printed."""
        rest, _ = self.process.communicate(timeout=200)
        self.output.append(rest)
        assert self.process.returncode == 0, "".join(self.output)[-8000:]
        return "".join(self.output)


def by_step(directory: Path) -> dict[int, float]:
    """The losses that a script has written, by step."""
    found = json.loads((directory / "losses.json").read_text())
    return {entry["step"]: entry["loss"] for entry in found if "loss" in entry}
