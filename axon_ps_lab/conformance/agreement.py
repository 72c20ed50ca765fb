"""Cases on ranks with different or invalid calls: every rank gets the error, and the group still works."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.types import DType, ReduceOp
from axon_ps_lab.conformance.trial import Trial

_Make = Callable[[Trial], Call]


def _all_reduce(numel: int = 12, dtype: DType = DType.F32, op: ReduceOp = ReduceOp.SUM) -> _Make:
    return lambda t: t.call(Operation.ALL_REDUCE, dtype, (numel,), op=op)


def _by_rank(operation: Operation, each: int, root: int = -1, last: int = 0) -> _Make:
    return lambda t: t.call(operation, DType.I64, (each,) * (t.n - 1) + (each + last,), root=root)


def _broadcast(root: int) -> _Make:
    return lambda t: t.call(Operation.BROADCAST, DType.F64, (6,), root=root)


def _barrier(trial: Trial) -> Call:
    return trial.call(Operation.BARRIER)


_PAIRS: dict[str, tuple[_Make, _Make]] = {
    "operation": (_all_reduce(), _barrier),
    "operation, with the same arrays": (_by_rank(Operation.ALL_GATHER, 3), _by_rank(Operation.GATHER, 3, 0)),
    "operation, in and out exchanged": (_by_rank(Operation.ALL_GATHER, 3), _by_rank(Operation.REDUCE_SCATTER, 3)),
    "shape": (_all_reduce(12), _all_reduce(13)),
    "shape, something and nothing": (_all_reduce(0), _all_reduce(4)),
    "shape, small and large": (_all_reduce(4), _all_reduce(200_000)),
    "shape, large and larger": (_all_reduce(200_000), _all_reduce(300_000)),
    "counts": (_by_rank(Operation.ALL_GATHER, 3), _by_rank(Operation.ALL_GATHER, 3, last=1)),
    "counts of a scatter": (_by_rank(Operation.SCATTER, 2, 0), _by_rank(Operation.SCATTER, 2, 0, last=2)),
    "dtype": (_all_reduce(dtype=DType.F32), _all_reduce(dtype=DType.I32)),
    "dtype, large": (_all_reduce(200_000, DType.BF16), _all_reduce(200_000, DType.F16)),
    "op": (_all_reduce(op=ReduceOp.SUM), _all_reduce(op=ReduceOp.MAX)),
    "root of a broadcast": (_broadcast(0), _broadcast(1)),
    "root of a gather": (_by_rank(Operation.GATHER, 3, 0), _by_rank(Operation.GATHER, 3, 1)),
}


def _disagree(trial: Trial, what: str, calls: list[Call]) -> None:
    """Make different calls; `calls` are those of all ranks."""
    request = trial.arrays(calls[trial.rank])
    before = [None if a is None else a.copy() for a in (request.data, request.output)]
    try:
        trial.perform(request)
    except Disagreement as error:
        for call in set(calls):
            trial.expect(str(call) in str(error), f"{what}: the error does not name the rank of {call}: {error}")
        odd = trial.ranks[-1]
        trial.expect(f"rank {odd}: {calls[-1]}" in str(error), f"{what}: the error does not name rank {odd}: {error}")
    else:
        trial.expect(False, f"{what}: {calls[trial.rank]} returned though the ranks disagree")
    for old, new in zip(before, (request.data, request.output), strict=True):
        same = old is None or new is None or np.array_equal(old.view(np.uint8), new.view(np.uint8))
        trial.expect(same, f"{what}: an array was changed though the ranks disagree")


def one_rank_disagrees(trial: Trial) -> None:
    """One rank makes another operation, or has another shape, dtype, reduction or root: the error names all calls."""
    trial.needs_ranks(2)
    for what, (most, odd) in _PAIRS.items():
        usual = most(trial)
        trial.not_made()
        _disagree(trial, what, [usual] * (trial.n - 1) + [odd(trial)])
        trial.healthy(f"a disagreement on {what}")


def the_first_half_disagrees_with_the_second(trial: Trial) -> None:
    """The first ranks make one call, the others another: the error names both."""
    trial.needs_ranks(3)
    one = _all_reduce(5)(trial)
    trial.not_made()
    other = _by_rank(Operation.REDUCE_SCATTER, 5)(trial)
    half = trial.n // 2
    calls = [one] * (trial.n - half - 1) + [other] * half + [other]
    request = trial.arrays(calls[trial.rank])
    try:
        trial.perform(request)
    except Disagreement as error:
        trial.expect(str(one) in str(error) and str(other) in str(error), f"the error does not name both: {error}")
    else:
        trial.expect(False, "half of the ranks disagree, and the call returned")
    trial.healthy("a disagreement of two halves")


def everybody_disagrees(trial: Trial) -> None:
    """Every rank makes a different call."""
    trial.needs_ranks(2)
    first = trial.call(Operation.ALL_REDUCE, DType.F32, (1,))
    calls = [
        Call(sequence=first.sequence, operation=first.operation, dtype=first.dtype, counts=(i + 1,), op=first.op)
        for i in range(trial.n)
    ]
    _disagree(trial, "everything", calls)
    trial.healthy("a disagreement of everybody")


def all_to_all_counts_that_do_not_match(trial: Trial) -> None:
    """A rank expects other counts than another sends: every rank gets the error."""
    trial.needs_ranks(2)
    call = trial.call(Operation.ALL_TO_ALL, DType.F32)
    sent, received = [2] * trial.n, [2] * trial.n
    if trial.rank == trial.n - 1:
        received[0] = 3
    output = trial.blank(sum(received), call.dtype)
    request = Request(
        call=call,
        output=output,
        data=trial.values(call, numel=sum(sent)),
        output_counts=tuple(received),
        input_counts=tuple(sent),
    )
    try:
        trial.perform(request)
    except Disagreement as error:
        odd = trial.ranks[-1]
        trial.expect(str(odd) in str(error), f"the error does not name rank {odd}: {error}")
    else:
        trial.expect(False, "an all_to_all whose counts do not match returned")
    trial.expect((output == 1).all(), "an all_to_all whose counts do not match changed its output")
    trial.healthy("an all_to_all whose counts do not match")


def what_cannot_be_done_is_refused(trial: Trial) -> None:
    """Arrays of a wrong size and operations without a meaning are refused before anything is sent."""
    wrong: dict[str, tuple[Call, int]] = {}
    for what, operation, dtype, op, numel in (
        ("the average of integers", Operation.ALL_REDUCE, DType.I32, ReduceOp.AVERAGE, 4),
        ("bitwise or of floats", Operation.ALL_REDUCE, DType.F32, ReduceOp.BOR, 4),
        ("an array that is too short", Operation.ALL_REDUCE, DType.F32, ReduceOp.SUM, 3),
    ):
        wrong[what] = trial.call(operation, dtype, (4,), op=op), numel
        trial.not_made()
    for what, (call, numel) in wrong.items():
        data = np.ones(numel, call.dtype.numpy)
        try:
            trial.backend.run(Request(call=call, data=data), trial.timeout_s)
        except Disagreement as error:
            trial.expect(False, f"{what} is no disagreement: {error}")
        except InvalidRequest:
            pass
        else:
            trial.expect(False, f"{what} was not refused")
        trial.healthy(what)


def one_rank_refuses(trial: Trial) -> None:
    """The last rank refuses a call: every rank gets the reason, and the group still works."""
    makes: dict[str, _Make] = {
        "small": _all_reduce(),
        "large": _all_reduce(200_000),
        "all_gather": _by_rank(Operation.ALL_GATHER, 3),
        "all_gather, large": _by_rank(Operation.ALL_GATHER, 70_000),
        "barrier": _barrier,
    }
    last = trial.n - 1
    for what, make in makes.items():
        call = make(trial)
        refusal = call.refused(InvalidRequest("its array is odd"))
        if trial.n == 1:
            trial.perform(trial.arrays(refusal))
        else:
            _disagree(trial, f"a refusal, {what}", [call] * last + [refusal])
        trial.healthy(f"a refusal, {what}")


def everybody_refuses(trial: Trial) -> None:
    """All ranks refuse: they agree, and there is no error."""
    call = _all_reduce()(trial)
    trial.perform(trial.arrays(call.refused(InvalidRequest(f"rank {trial.rank} will not"))))


CASES = (
    one_rank_disagrees,
    one_rank_refuses,
    everybody_refuses,
    the_first_half_disagrees_with_the_second,
    everybody_disagrees,
    all_to_all_counts_that_do_not_match,
    what_cannot_be_done_is_refused,
)
