"""What people's own scripts do, as data: a case is a script that runs on plain torch and on a wrapped model.

What counts as right is torch's value. An error of ours is right too where a page of the documentation says so. A case
whose outcome torch cannot tell (a misuse of checkpoints, say) checks it by itself and raises `Wrong`.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shared_workers import Failed, SharedWorkers, Task
from sides import Side, Values, Wrapped, run_plain, worst_of

ROOT = Path(__file__).parents[2]
WRAPPERS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "DDP")
SHARDED = WRAPPERS[:4]
SERVED = WRAPPERS[:3]
WORKERS = (1, 2, 3)
REFUSALS = ("InvalidRequest", "Misuse", "StepAborted", "CheckpointError")
"""Classes of errors that say what the script did."""
WORKS, REFUSED = "works", "refused"
WRONG, UNSAID, MISLEADING, HANGS = "silently different", "refused, and no page says so", "another error", "hangs"

WHERE_WRITTEN = "where it is written"
"""In place of a pattern: an argument that cannot be is refused by the call that has it, and no page needs to say so."""
PAGES = (
    "fsdp.md",
    "wrapped_model.md",
    "ddp.md",
    "models.md",
    "asynchrony.md",
    "integrations.md",
    "data.md",
    "limits.md",
    "sizing.md",
    "torch_names.md",
    "optimizers.md",
)

Script = Callable[[Side], Values]


class Wrong(Exception):
    """A case has seen something that is not right."""


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        name: "family: what it does".
        script: what each worker runs; the values that it returns are compared.
        wrappers: those to which it applies.
        workers: the numbers of workers to which it applies.
        says: a pattern; a line of the documentation that has it says that this is refused. Or `WHERE_WRITTEN`.
        tolerance: of a value, ||a - b|| / ||b||.
        timeout_s: how long a worker waits for others. What it waits for in vain then is refused so.
    """

    name: str
    script: Script
    wrappers: Sequence[str] = WRAPPERS
    workers: Sequence[int] = WORKERS
    says: str = ""
    tolerance: float = 2e-5
    timeout_s: float = 300.0

    @property
    def family(self) -> str:
        """The first part of the name."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Configuration:
    """How a case is run.

    Attributes:
        wrapper: of `WRAPPERS`.
        mapped: whether parameters are mapped from a server of this host; else it is as between hosts.
        workers: how many.
    """

    wrapper: str
    mapped: bool
    workers: int

    def __str__(self) -> str:
        return f"{self.wrapper}{' mapped' if self.mapped else ''} x{self.workers}"


@dataclass(frozen=True)
class Ended:
    """How a worker ended.

    Attributes:
        values: what the script returned.
        error: the error's text; empty when there was none.
        kinds: the names of the error's class and its bases.
        where: the end of the traceback.
    """

    values: Values = field(default_factory=dict)
    error: str = ""
    kinds: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `WORKS`, `REFUSED` with the page in the text, or a failure."""

    what: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing has to be mended."""
        return self.what in (WORKS, REFUSED)


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Script], Script]:
    """Add a script to the cases."""

    def add(script: Script) -> Script:
        assert name not in CASES, name
        CASES[name] = Case(name, script, **options)
        return script

    return add


def add(name: str, script: Script, **options: Any) -> None:
    """The same as a call."""
    case(name, **options)(script)


def load_all() -> Mapping[str, Case]:
    """All cases."""
    import cases_of_arguments  # noqa: F401
    import cases_of_loops  # noqa: F401
    import cases_of_modules  # noqa: F401
    import cases_of_optimizers  # noqa: F401
    import cases_of_processes  # noqa: F401
    import cases_of_state  # noqa: F401
    import cases_of_views  # noqa: F401

    return CASES


def configurations(chosen: Case) -> Iterator[Configuration]:
    """All that apply to a case."""
    for wrapper, mapped, workers in itertools.product(chosen.wrappers, (True, False), chosen.workers):
        yield Configuration(wrapper, mapped, workers)


def sample(cases: Sequence[Case], every: int = 1) -> list[tuple[Case, Configuration]]:
    """Some cases, each in one configuration: families, wrappers, mapping and numbers of workers meet in pairs.

    Args:
        cases: all of them.
        every: take each such case, of each family.
    """
    met = Counter[tuple[object, ...]]()
    taken = []
    for family, members in itertools.groupby(cases, key=lambda each: each.family):
        for each in sorted(
            list(members)[::every], key=lambda each: len(each.wrappers)
        ):  # those with least choice first
            best = min(configurations(each), key=lambda how: _times(met, _pairs(family, how)))
            met.update(_pairs(family, best))
            taken.append((each, best))
    return taken


def _pairs(family: str, how: Configuration) -> list[tuple[object, ...]]:
    facts = (("family", family), ("wrapper", how.wrapper), ("mapped", how.mapped), ("workers", how.workers))
    return [(*a, *b) for a, b in itertools.combinations(facts, 2)]


def _times(met: Counter[tuple[object, ...]], pairs: list[tuple[object, ...]]) -> tuple[int, int]:
    """The times that a family has met this wrapper, and those of all pairs together."""
    return met[pairs[0]], sum(met[pair] for pair in pairs)


# ---------------------------------------------------------------------- running


def perform(world: Any, name: str, wrapper: str, uri: str) -> Ended:
    """A worker's part."""
    return _ended(lambda: load_all()[name].script(Wrapped(world, wrapper, uri)))


def _ended(call: Callable[[], Values]) -> Ended:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Ended({name: _sendable(torch.as_tensor(value)) for name, value in call().items()})
        except Exception as error:
            kinds = tuple(c.__name__ for c in type(error).__mro__[:-2])
            return Ended(error=str(error) or kinds[0], kinds=kinds, where=_where(error))


def _sendable(value: torch.Tensor) -> torch.Tensor:
    """A copy; in float32 if it is of float8, which pickle cannot read again."""
    is_float8 = value.is_floating_point() and value.element_size() == 1
    return value.detach().float() if is_float8 else value.detach().clone()


def _where(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-5:])[-1500:]


@cache
def _plain(name: str, workers: int) -> list[Ended] | str:
    """What plain torch makes of it, by rank; or the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ranks = run_plain(CASES[name].script, workers)
            return [Ended({key: _sendable(torch.as_tensor(v)) for key, v in values.items()}) for values in ranks]
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def run_case(chosen: Case, how: Configuration, shared: SharedWorkers) -> Outcome:
    """Run a case on both sides and compare."""
    wanted = _plain(chosen.name, how.workers)
    with tempfile.TemporaryDirectory() as uri:
        got = shared.run(
            Task(
                function="case_table:perform",
                args=(chosen.name, how.wrapper, uri),
                workers=how.workers,
                mapped=how.mapped,
                wait_s=chosen.timeout_s,
                per_node=how.workers if how.wrapper == "HYBRID_SHARD" else 1,
            )
        )
    return compare(chosen, wanted, got)


def compare(chosen: Case, wanted: list[Ended] | str, got: Sequence[Ended | Failed]) -> Outcome:
    """The outcome of what the workers have returned."""
    if hung := [g.text for g in got if isinstance(g, Failed) and g.hung]:
        return Outcome(HANGS, hung[0])
    ended = [g for g in got if isinstance(g, Ended)]
    if failed := min((e for e in ended if e.error), key=lambda e: "MemberLost" in e.kinds, default=None):
        return _of_error(chosen, failed, wanted)
    if len(ended) < len(got):
        return Outcome(MISLEADING, next(g.text for g in got if isinstance(g, Failed)))
    if isinstance(wanted, str):
        return Outcome(WRONG, f"torch refuses it: {wanted}")
    for rank, (ours, torchs) in enumerate(zip(ended, wanted, strict=True)):
        values = torchs.values

        def allowed(name: str, values: Values = values) -> float:
            return chosen.tolerance * max(float(values[name].double().norm()), 1e-3)

        common = ours.values if set(ours.values) >= set(values) else ours.values | {}
        if text := worst_of(common, values, allowed):
            return Outcome(WRONG, f"rank {rank}: {text}")
    return Outcome(WORKS)


def _of_error(chosen: Case, failed: Ended, wanted: list[Ended] | str) -> Outcome:
    said = f"{failed.kinds[0]}: {failed.error}"
    if "Wrong" in failed.kinds:
        return Outcome(WRONG, failed.error)
    if chosen.says == WHERE_WRITTEN and ("InvalidRequest" in failed.kinds or "unexpected keyword" in failed.error):
        return Outcome(REFUSED, f"{WHERE_WRITTEN}: {said[:160]}")
    waits = chosen.timeout_s < Case.timeout_s
    if not set((*REFUSALS, "Timeout") if waits else REFUSALS) & set(failed.kinds):
        if isinstance(wanted, str) and "AxonError" not in failed.kinds:
            return Outcome(REFUSED, f"as torch does: {said[:160]}")
        return Outcome(MISLEADING, f"{said[:400]}\n{failed.where}")
    if isinstance(wanted, str):
        return Outcome(REFUSED, f"as torch does: {said[:160]}")
    page = chosen.says and page_that_says(chosen.says)
    return Outcome(REFUSED, f"{page}: {said[:160]}") if page else Outcome(UNSAID, said[:400])


@cache
def page_that_says(pattern: str) -> str:
    """The first page of the documentation with a line that has the pattern, and the line's number; else empty."""
    for page in (ROOT / "docs" / name for name in PAGES):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                return f"{page.relative_to(ROOT)}:{number}"
    return ""
