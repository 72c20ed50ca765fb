"""Cases that end a group: missing ranks, an abort, closing. Each needs its own group."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from axon_ps.collectives.backends.base import Operation, Request
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout
from axon_ps.types import DType
from axon_ps_lab.conformance.trial import Trial

_SHORT_S = 0.4
_PROMPT_S = 60.0


def _names(error: BaseException, rank: int) -> bool:
    return re.search(rf"\b{rank}\b", str(error)) is not None


def _expect_timeout(trial: Trial, missing: int, act: Callable[[], object], what: str) -> None:
    rank = trial.ranks[missing]
    try:
        act()
    except Timeout as error:
        trial.expect(_names(error, rank), f"{what} without rank {rank}: the error does not name it: {error}")
    except Broken as error:  # another rank's time-out has ended the group already
        reported = trial.n > 2 and _names(error, rank)
        trial.expect(reported, f"{what} without rank {rank} raised {type(error).__name__}: {error}")
    else:
        trial.expect(False, f"{what} returned without rank {rank}")


def _expect_over(trial: Trial) -> None:
    call = trial.call(Operation.BARRIER)
    try:
        trial.backend.run(Request(call=call), _SHORT_S)
    except AxonError:
        return
    trial.expect(False, "a group that had ended made another barrier")


def rank_0_does_not_come(trial: Trial) -> None:
    """The error on the others names the missing rank, and the group is over."""
    trial.needs_ranks(2)
    call = trial.call(Operation.ALL_REDUCE, DType.F32, (3,))
    if trial.rank == 0:
        return
    request = trial.arrays(call)
    _expect_timeout(trial, 0, lambda: trial.perform(request, _SHORT_S), "an all_reduce")
    _expect_over(trial)


def the_last_rank_does_not_come(trial: Trial) -> None:
    """The last rank neither calls the barrier nor sends to rank 0, which waits for both."""
    trial.needs_ranks(2)
    last = trial.n - 1
    call = trial.call(Operation.BARRIER)
    if trial.rank == last:
        return

    def receive() -> None:
        got = trial.blank(2, DType.F32)
        act = lambda: trial.backend.recv(got, DType.F32, last, 5, _SHORT_S)  # noqa: E731
        _expect_timeout(trial, last, act, "a receive")

    receiver = threading.Thread(target=receive, daemon=True)
    if trial.rank == 0:
        receiver.start()
    _expect_timeout(trial, last, lambda: trial.backend.run(Request(call=call), _SHORT_S), "a barrier")
    if trial.rank == 0:
        receiver.join(_PROMPT_S)
        trial.expect(not receiver.is_alive(), "a receive outlived its deadline")
    _expect_over(trial)


def an_abort_ends_what_is_pending(trial: Trial) -> None:
    """An abort by another thread ends calls at once with the given error; the group can then be closed, twice."""
    trial.needs_ranks(2)
    lost = MemberLost(f"rank {trial.ranks[-1]} has left the job")
    if trial.rank == trial.n - 1:
        return
    call = trial.call(Operation.ALL_REDUCE, DType.F32, (70_000,))
    request = trial.arrays(call)
    caught: list[str] = []  # texts, because the tracebacks of errors would keep the backend alive

    def receive() -> None:
        try:
            trial.backend.recv(trial.blank(2, DType.F32), DType.F32, trial.n - 1, 5, trial.timeout_s)
        except BaseException as error:
            caught.append(repr(error))

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    aborter = threading.Timer(0.2, trial.backend.abort, [lost])
    begin = time.monotonic()
    aborter.start()
    try:
        trial.perform(request)
    except BaseException as error:
        caught.append(repr(error))
    receiver.join(_PROMPT_S)
    aborter.join(_PROMPT_S)
    trial.expect(not receiver.is_alive(), "an abort did not end a receive")
    trial.expect(time.monotonic() - begin < _PROMPT_S, "an abort took long to end an all_reduce")
    reported = caught == [repr(lost)] * 2
    trial.expect(reported, f"an abort with {lost!r} raised {caught}")
    _expect_over(trial)
    trial.backend.close()
    trial.backend.close()


CASES = (rank_0_does_not_come, the_last_rank_does_not_come, an_abort_ends_what_is_pending)
