"""`make lab NAME=programs`: training programs that hypothesis draws, on plain torch and on a wrapped model.

    make lab NAME=programs ARGS="--programs 2000 --seed 7"
    make lab NAME=programs ARGS="--replay build/programs/finding1.json"

Each ends with torch's values or is refused by an error of ours before a value is wrong; anything else is a finding,
which is made as small as it can be and written to a file. Programs that need all that a smaller finding needs are
counted with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "integration"), str(ROOT / "tests"), str(ROOT)]

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from axon_ps.testing import preloaded  # noqa: E402
from judged import REFUSED, VOID, Verdict, judge  # noqa: E402
from program import STRATEGIES, Program, programs  # noqa: E402
from shared_workers import SharedWorkers  # noqa: E402

PRELOADED = ("torch", "torch._dynamo", "axon_ps.parallel", "axon_ps.worker.world")
TIMEOUT_S = 60.0


class Found(Exception):
    """A program is a finding, and none of those before."""


@dataclass
class Finding:
    """A kind of finding.

    Attributes:
        program: the smallest program that has it.
        verdict: on it.
        count: how many programs need all that it needs.
        where: strategies of those, with how parameters were read and the number of workers.
    """

    program: Program
    verdict: Verdict
    count: int = 1
    where: Counter[str] = field(default_factory=Counter)

    def explains(self, program: Program, verdict: Verdict) -> bool:
        """Whether another failure is likely to be the same."""
        return self.verdict.outcome == verdict.outcome and self.program.features() <= program.features()


class Campaign:
    """Programs that are drawn and run.

    Args:
        shared: the workers.
        programs: how many.
        seed: another one, other programs.
        shrink_s: how long a finding is made smaller; 0 = not at all.
        strategies: that are drawn.
        without: programs that need one of these are not drawn; see `Program.features`.
        directory: where findings are written; None = nowhere.
    """

    def __init__(
        self,
        shared: SharedWorkers,
        *,
        programs: int,
        seed: int,
        shrink_s: float = 0.0,
        strategies: Sequence[str] = STRATEGIES,
        without: Collection[str] = (),
        directory: Path | None = None,
    ) -> None:
        self._shared, self._programs, self._seed, self._shrink_s = shared, programs, seed, shrink_s
        self._strategies = tuple(strategies)
        self._without, self._directory = frozenset(without), directory
        self.findings: list[Finding] = []
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._verdicts: dict[str, Verdict] = {}
        self._counted: set[str] = set()
        self._ends = 0.0
        self.smallest: Program | None = None

    def run(self) -> None:
        """Draw and run programs until there were as many as wanted."""
        number, before = 0, -1
        while (left := self._programs - len(self._counted)) > 0 and len(self._counted) > before:
            before = len(self._counted)
            try:
                self._round(left, self._seed + 1000003 * number)
            except Found:
                assert self.smallest is not None
                self._note(self.smallest, self._verdicts[self.smallest.to_json()])
            self.smallest = None
            number += 1

    def _round(self, count: int, number: int) -> None:
        phases = (Phase.generate, Phase.shrink) if self._shrink_s else (Phase.generate,)

        @seed(number)
        @settings(
            max_examples=count,
            phases=phases,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(self._strategies).filter(lambda program: not self._without & program.features()))
        def one(program: Program) -> None:
            self._one(program)

        one()

    def _one(self, program: Program) -> None:
        key = program.to_json()
        if (verdict := self._verdicts.get(key)) is None:
            if self.smallest is not None and time.monotonic() > self._ends:
                return
            verdict = self._verdicts[key] = judge(program, self._shared)
            if self.smallest is None:
                self._count(program, verdict)
        elif self.smallest is None:
            return  # it was drawn again
        if not verdict.is_finding or any(f.explains(program, verdict) for f in self.findings):
            return
        if not self._shrink_s:
            self._note(program, verdict)
            return
        if self.smallest is None:
            self._ends = time.monotonic() + self._shrink_s
        self.smallest = program
        raise Found

    def _count(self, program: Program, verdict: Verdict) -> None:
        self.outcomes[verdict.outcome] += 1
        self._counted.add(program.to_json())
        if verdict.outcome in (REFUSED, VOID):
            self.reasons[f"{verdict.outcome}: {verdict.text[:110]}"] += 1
        for finding in self.findings:
            if verdict.is_finding and finding.explains(program, verdict):
                finding.count += 1
                finding.where[_where(program)] += 1
                break

    def _note(self, program: Program, verdict: Verdict) -> None:
        self.findings.append(finding := Finding(program, verdict, where=Counter([_where(program)])))
        print(shown(len(self.findings), finding), flush=True)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"finding{len(self.findings)}.json"
            path.write_text(program.to_json() + "\n", encoding="utf-8")


def _where(program: Program) -> str:
    return f"{program.strategy}{' mapped' if program.mapped else ''} x{program.workers}"


def shown(number: int, finding: Finding) -> str:
    """A finding as text."""
    where = ", ".join(f"{name} {count}" for name, count in finding.where.most_common())
    verdict = finding.verdict
    first = f"{number}. {verdict.outcome}, {finding.count} programs ({where})"
    return "\n   ".join((first, finding.program.to_json(), verdict.text))


@contextmanager
def workers(timeout_s: float = TIMEOUT_S) -> Iterator[SharedWorkers]:
    """Workers for programs."""
    with tempfile.TemporaryDirectory() as logs, SharedWorkers(2, Path(logs), timeout_s=timeout_s) as shared:
        yield shared


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="another one, other programs; 0 = one of its own")
    parser.add_argument("--shrink-s", type=float, default=60.0, help="how long a finding is made smaller")
    parser.add_argument("--without", nargs="+", default=(), help="features, such as op.loss=penalty block.kind=decay")
    parser.add_argument("--replay", type=Path, nargs="+", help="run these programs, and nothing else")
    parser.add_argument("--findings", type=Path, default=ROOT / "build" / "programs", help="where findings are written")
    options = parser.parse_args()
    began, number = time.monotonic(), options.seed or int(time.time())
    with preloaded(PRELOADED), workers() as shared:
        if options.replay is not None:
            verdicts = [judge(Program.read(path), shared) for path in options.replay]
            for path, verdict in zip(options.replay, verdicts, strict=True):
                print(f"{path.name}: {verdict.outcome}: {verdict.text}")
            return int(any(verdict.is_finding for verdict in verdicts))
        campaign = Campaign(
            shared,
            programs=options.programs,
            seed=number,
            shrink_s=options.shrink_s,
            without=options.without,
            directory=options.findings,
        )
        try:
            campaign.run()
        finally:
            for count, finding in enumerate(sorted(campaign.findings, key=lambda f: -f.count), 1):
                print(shown(count, finding))
            for text, times in campaign.reasons.most_common(40):
                print(f"  {times} x {text}")
            print(f"seed {number}, {time.monotonic() - began:.0f} s: {dict(campaign.outcomes)}")
    return int(bool(campaign.findings))


if __name__ == "__main__":
    sys.exit(main())
