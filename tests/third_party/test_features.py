"""Features of Accelerate, Lightning and Trainer at one and at two workers: the numbers of DDP over gloo, or refused.

Each framework's script, `features_of_*.py`, runs over gloo and on shard servers. Everything that it computes is
compared: parameters, learning rates, losses, averages.

Tests of `lightning/callbacks.py`.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import library_runs as library

pytestmark = pytest.mark.timeout(1500)  # four starts of processes that import all of a framework

TOLERANCE: Final = 1e-5
BF16: Final = 2e-2

VALUES: Final = r"Misuse: .*on parameter 'backbone\.0\.weight'.*summon_full_params\(\)"
CLIPPED: Final = r"Misuse: .*clamp_ cannot be done to the gradient of .*clip_grad_norm_"
FROZEN: Final = r"Misuse: parameter 'backbone\.0\.weight' was frozen when the model was wrapped"

REFUSED: Final = {
    "accelerate": {
        "clip value": CLIPPED,
        "EMA of the module": VALUES,
        "EMA of the prepared": VALUES,
        "unfreeze": FROZEN,
        "two optimizers": r"Misuse: another optimizer of model .*a model has one at a time",
    },
    "lightning": {
        "clip value": CLIPPED,
        "two optimizers": r"InvalidRequest: configure_optimizers\(\) returned 2 optimizers",
        "unfreeze": FROZEN,
    },
    "trainer": {
        "adafactor": r"InvalidRequest: Adafactor has no form on shard servers",
        "EMA": VALUES,
        "unfreeze": FROZEN,
    },
}
"""docs/integrations.md, "What is refused", says so of each."""

OF_ONE_WORKER: Final = {"BackboneFinetuning", "resume, BackboneFinetuning", "evaluate, train, predict"}
"""At two workers, too, to be compared with one that has all of the batch, since over gloo each worker trains a model of
its own: DDP averages no gradient of a parameter that was frozen when it was wrapped, and Accelerate wraps no model in
DDP that Trainer has evaluated before."""


@functools.cache
def found(framework: str, over: str, workers: int, directory: Path) -> dict[str, Any]:
    """The outcome of each feature.

    Args:
        framework: of which script.
        over: "gloo" or "axon".
        workers: how many.
        directory: where scripts save what they resume from.
    """
    where = directory / f"{framework}_{over}_{workers}"
    where.mkdir()
    script = Path(__file__).with_name(f"features_of_{framework}.py")
    count = ["--nproc-per-node", str(workers)]
    launcher = (
        ["-m", "axon_ps.cli.main", "run", *count, "--shards", "2"]
        if over == "axon"
        else ["-m", "torch.distributed.run", *count, "--master-port", "0", "--standalone"]
    )
    parts = ("first", "second") if over == "axon" else ("both",)  # a job's models are named in their order
    result: dict[str, Any] = {}
    for part in parts:
        done = subprocess.run(
            [sys.executable, *launcher, str(script), over, str(where), part],
            cwd=where,
            env=library.ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        result |= json.loads((where / f"{part}.json").read_text())
    return result


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("framework", REFUSED)
def test_features_give_the_numbers_of_gloo_or_are_refused_by_name(
    framework: str, workers: int, directory: Path
) -> None:
    ours, theirs = (found(framework, over, workers, directory) for over in ("axon", "gloo"))
    assert ours.keys() == theirs.keys()
    problems = []
    for name in ours:
        oracle = found(framework, "gloo", 1, directory) if name.removesuffix(", first") in OF_ONE_WORKER else theirs
        problem, said = judged(ours[name], oracle[name], REFUSED[framework].get(name), BF16 if "bf16" in name else 0)
        print(f"{framework:12} {workers} {name:32} {said}")
        problems += [f"{name}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


def judged(ours: Any, theirs: Any, refused: str | None, tolerance: float) -> tuple[str, str]:
    """The faults of a feature, and the remarks on it."""
    if "error" in theirs:
        return f"over gloo: {theirs['error']}", "not possible"
    if refused is not None:
        error = ours.get("error", "it ran")
        return "" if re.search(refused, error, re.DOTALL) else f"not refused by name: {error}", f"refused: {error[:90]}"
    if "error" in ours:
        return ours["error"], "refused"
    a, b = dict(flat("", ours["values"])), dict(flat("", theirs["values"]))
    if a.keys() != b.keys():
        return f"other numbers: {sorted(a.keys() ^ b.keys())[:4]}", "differs"
    largest = max(abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 0.1) for key in b)
    return "" if largest <= (tolerance or TOLERANCE) else f"differs by {largest:.1e}", f"equal to {largest:.0e}"


def flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of nested dicts and lists, by its place."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{name}/{key}", part)
    else:
        yield name, float(value)
