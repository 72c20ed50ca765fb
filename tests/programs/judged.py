"""Whether a program ended as it must: with torch's values, or refused by name before a value was wrong."""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from interpreted import Kept, run
from program import Program
from shared_workers import Failed, SharedWorkers, Task
from sides import Values, Wrapped, distance, run_plain, worst_of

TOLERANCE = {"f32": 1e-5, "f64": 1e-5, "bf16": 0.02}
"""Of a parameter or buffer, ||a - b|| / ||b||; servers have masters in f32."""
ROUNDING = 30.0
"""The allowance beside it, in units of the change that another precision and two jitters make in torch's own values.

A true gradient of zero (of a bias before a batch norm) is one of 1e-9, up or down, that Adam makes a step of.
"""
REFUSALS = ("InvalidRequest", "Misuse", "StepAborted")
"""Classes of errors that a user's program may get; others of our tree blame somebody else."""
WRONG, FOREIGN, HANG, LATE, ODD = "wrong value", "foreign error", "hang", "refused too late", "misleading error"
SAME, REFUSED, VOID = "same", "refused", "void"


@dataclass(frozen=True)
class Verdict:
    """How a program ended.

    Attributes:
        outcome: `SAME`, `REFUSED`, `VOID` (torch itself does not run it), or a kind of finding.
        text: what was seen.
    """

    outcome: str
    text: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether something has to be mended."""
        return self.outcome not in (SAME, REFUSED, VOID)


def wrapped(world: Any, text: str, uri: str) -> Kept:
    """A worker's part of a program."""
    program = Program.from_json(text)
    return run(program, Wrapped(world, program.strategy, uri, torchs=program.torchs))


def plain(program: Program, **other: Any) -> list[Kept]:
    """The same on plain torch, by rank; `other` are the arguments of `run` for an estimate of rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_plain(lambda side: run(program, side, **other, snapshots=True), program.workers)


def judge(program: Program, shared: SharedWorkers) -> Verdict:
    """Run a program on both sides and compare."""
    try:
        wanted = plain(program)
    except Exception as error:  # a rank of plain torch has left the others
        return Verdict(VOID, f"torch: {type(error).__name__}")
    with tempfile.TemporaryDirectory() as uri:
        got = shared.run(
            Task(
                function="judged:wrapped",
                args=(program.to_json(), uri),
                workers=program.workers,
                shards=program.shards,
                mapped=program.mapped,
                per_node=program.workers if program.strategy == "HYBRID_SHARD" and program.shards == 1 else 1,
            )
        )
    return compare(program, wanted, got)


def compare(program: Program, wanted: list[Kept], got: list[Kept | Failed]) -> Verdict:
    """The verdict on what the workers have returned."""
    if hung := [(rank, g.text) for rank, g in enumerate(got) if isinstance(g, Failed) and g.hung]:
        return Verdict(HANG, f"rank {hung[0][0]}: {hung[0][1]}")
    kept = {rank: g for rank, g in enumerate(got) if isinstance(g, Kept)}
    if not kept or (len(kept) < len(got) and not any(k.error for k in kept.values())):
        return Verdict(FOREIGN, next(g.text for g in got if isinstance(g, Failed)))
    void = any(w.error for w in wanted)
    rounding = None if void else _rounding(program, wanted)
    verdicts = [_of_rank(program, rank, wanted[rank], k, rounding and rounding[rank]) for rank, k in kept.items()]
    if void and not any(v.outcome == HANG for v in verdicts):
        return Verdict(VOID, next(w.error for w in wanted if w.error))
    worst = [v for v in verdicts if v.is_finding] or [v for v in verdicts if v.outcome == REFUSED] or verdicts
    return worst[0]


@dataclass(frozen=True)
class Rounding:
    """How far a rank's values move by rounding.

    Attributes:
        values: by name, after each operation.
        losses: per operation, of each forward.
    """

    values: list[dict[str, float]]
    losses: list[list[float]]


def _rounding(program: Program, wanted: list[Kept]) -> list[Rounding] | None:
    """The furthest that torch's own values move, by rank; None where torch refuses another precision."""
    try:
        others = [
            plain(program, dtype="f32" if program.net.dtype == "f64" else "f64"),
            plain(program, jitter=1),
            plain(program, jitter=2),
        ]
    except Exception:
        return None
    if any(kept.error for other in others for kept in other):
        return None
    return [_moved(own, [other[rank] for other in others]) for rank, own in enumerate(wanted)]


def _moved(own: Kept, others: list[Kept]) -> Rounding:
    return Rounding(
        values=[
            {name: max(distance(o.after[i][name], value) for o in others) for name, value in values.items()}
            for i, values in enumerate(own.after)
        ],
        losses=[
            [max(_apart(o.losses[i][k], loss) for o in others) for k, loss in enumerate(losses)]
            for i, losses in enumerate(own.losses)
        ],
    )


def _apart(a: float, b: float) -> float:
    """|a - b|; inf where only one of them is a number."""
    return abs(a - b) if math.isfinite(a - b) else math.inf


def _of_rank(program: Program, rank: int, wanted: Kept, got: Kept, rounding: Rounding | None) -> Verdict:
    if wanted.error:
        return Verdict(VOID, wanted.error)
    uncommitted = f"; not committed: {got.uncommitted}" if got.uncommitted else ""
    if (number := _first_other_loss(program, wanted, got, rounding)) >= 0:
        text = f"operation {number}: losses {got.losses[number]}, torch's {wanted.losses[number]}{uncommitted}"
        return Verdict(WRONG if not got.error else LATE, f"rank {rank}: {text}; {got.error[:200]}")
    if not got.error:
        text = worst_of(
            got.values, wanted.after[-1], _allowed(program, wanted.after[-1], rounding and rounding.values[-1])
        )
        return Verdict(WRONG, f"rank {rank}: {text}{uncommitted}") if text else Verdict(SAME)
    if "AxonError" not in got.kind:
        return Verdict(FOREIGN, f"rank {rank}, operation {got.at}: {got.kind[0]}: {got.error[:300]}\n{got.where}")
    if not set(REFUSALS) & set(got.kind):
        return Verdict(ODD, f"rank {rank}, operation {got.at}: {got.kind[0]}: {got.error[:300]}\n{got.where}")
    if got.at >= 0 and got.values and (text := _wrong_at_refusal(program, wanted, got, rounding)):
        return Verdict(LATE, f"rank {rank}, operation {got.at}: {got.kind[0]}: {got.error[:200]}; {text}")
    return Verdict(REFUSED, f"operation {got.at}: {got.kind[0]}: {got.error}")


def _wrong_at_refusal(program: Program, wanted: Kept, got: Kept, rounding: Rounding | None) -> str:
    """Which parameter has neither the value from before the operation that was refused nor that from after it.

    What is written to a unit that is unsharded, since a forward had no backward, is refused by whatever reads it next.
    """
    texts = []
    moments = [got.at, min(got.at + 1, len(wanted.after) - 1)]
    for number in range(got.at - 1, -1, -1) if "was changed in place" in got.error else ():
        if program.loop[number].kind in ("train", "step", "load", "load state"):
            break
        moments += [number] if program.loop[number].kind == "edit" else []
    for moment in moments:
        values = {n: v for n, v in wanted.after[moment].items() if not _is_buffer(n)}
        ours = {n: v for n, v in got.values.items() if not _is_buffer(n)}
        texts.append(worst_of(ours, values, _allowed(program, values, rounding and rounding.values[moment])))
    return texts[0] if all(texts) else ""


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in (
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "calls",
        "mean",
        "_u",
        "_v",
    )


def _allowed(program: Program, values: Values, rounding: dict[str, float] | None) -> Any:
    return partial(_limit, program, values, rounding or {})


def _limit(program: Program, values: Values, rounding: dict[str, float], name: str) -> float:
    dtypes = {program.net.dtype, *(b.dtype for b in program.net.blocks if b.dtype)}
    relative = max(TOLERANCE[dtype] for dtype in dtypes)
    return relative * max(float(values[name].double().norm()), 1e-3) + ROUNDING * rounding.get(name, 0.0)


def _first_other_loss(program: Program, wanted: Kept, got: Kept, rounding: Rounding | None) -> int:
    relative = 1e-3 if {program.net.dtype, *(b.dtype for b in program.net.blocks)} <= {"f32", "f64", ""} else 0.1
    for number, (ours, torchs) in enumerate(zip(got.losses, wanted.losses, strict=False)):
        for k, (a, b) in enumerate(zip(ours, torchs, strict=False)):
            limit = relative * max(abs(b), 1e-3) + (ROUNDING * rounding.losses[number][k] if rounding else 0.0)
            if not abs(a - b) <= limit and not (a != a and b != b):
                return number
    return -1
