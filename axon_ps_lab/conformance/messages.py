"""Cases on `send` and `recv`: tags, order, any source, sizes, and parallel collectives."""

from __future__ import annotations

import contextlib
import threading

import numpy as np

from axon_ps.collectives.backends.base import Operation
from axon_ps.errors import Disagreement
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.conformance import oracle
from axon_ps_lab.conformance.trial import SEED, Trial

_LARGE = 300_011


def _message(dtype: DType, numel: int, sender: int, number: int = 0) -> Array:
    return oracle.values(dtype, numel, SEED, 77, sender, number)


def _neighbours(trial: Trial) -> tuple[int, int]:
    """Return the ranks before and after this one, in a ring."""
    trial.needs_ranks(2)
    return (trial.rank - 1) % trial.n, (trial.rank + 1) % trial.n


def _receive(trial: Trial, dtype: DType, numel: int, source: int, tag: int, number: int = 0) -> None:
    got = trial.blank(numel, dtype)
    sender = trial.backend.recv(got, dtype, source, tag, trial.timeout_s)
    what = f"{numel} {dtype.value} from rank {source} with tag {tag}"
    trial.expect(sender == source, f"{what} came from rank {sender}")
    trial.expect_array(what, got, _message(dtype, numel, source, number), dtype)


def a_ring_in_every_dtype_and_size(trial: Trial) -> None:
    """Every rank sends to the next: nothing, a little, and more than fits in one message."""
    before, after = _neighbours(trial)
    for dtype, numel in [*((d, 13) for d in trial.dtypes), (DType.F32, 0), (DType.BF16, 1), (DType.F32, _LARGE)]:
        with trial.sending(_message(dtype, numel, trial.rank), dtype, after, 0):
            _receive(trial, dtype, numel, before, 0)


def messages_of_one_tag_arrive_in_order(trial: Trial) -> None:
    """Messages of different sizes arrive in order."""
    before, after = _neighbours(trial)
    sizes = [100, 1, 70_000, 0, 5]

    def send_all() -> None:
        for number, numel in enumerate(sizes):
            data = _message(DType.I32, numel, trial.rank, number)
            trial.backend.send(data, DType.I32, after, 4, trial.timeout_s)
            data[:] = 0  # changing the buffer does not change a message that was sent

    thread = threading.Thread(target=send_all, daemon=True)
    thread.start()
    for number, numel in enumerate(sizes):
        _receive(trial, DType.I32, numel, before, 4, number)
    thread.join(trial.timeout_s)
    trial.expect(not thread.is_alive(), "sends did not return")


def tags_are_distinguished(trial: Trial) -> None:
    """Messages are received in another order than they were sent."""
    before, after = _neighbours(trial)
    with contextlib.ExitStack() as stack:
        for tag in (1, 2, 1_000_000):
            stack.enter_context(trial.sending(_message(DType.F32, 8, trial.rank, tag), DType.F32, after, tag))
        for tag in (1_000_000, 1, 2):
            _receive(trial, DType.F32, 8, before, tag, tag)


def from_any_rank(trial: Trial) -> None:
    """Rank 0 receives from any rank, and gets the sender's rank."""
    trial.needs_ranks(2)
    for round_ in range(2):
        if trial.rank:
            with trial.sending(_message(DType.I64, 3, trial.rank, round_), DType.I64, 0, 9 + round_):
                pass
            continue
        senders = set()
        for _ in range(trial.n - 1):
            got = trial.blank(3, DType.I64)
            sender = trial.backend.recv(got, DType.I64, -1, 9 + round_, trial.timeout_s)
            trial.expect_array(f"from rank {sender}", got, _message(DType.I64, 3, sender, round_), DType.I64)
            senders.add(sender)
        trial.expect(senders == set(range(1, trial.n)), f"messages came from the ranks {senders}")


def everybody_to_everybody_from_many_threads(trial: Trial) -> None:
    """Every rank sends to all others and receives from them at the same time."""
    trial.needs_ranks(2)
    others = [r for r in range(trial.n) if r != trial.rank]
    receivers = [
        threading.Thread(target=_receive, args=(trial, DType.F32, 500, r, 3, trial.rank), daemon=True) for r in others
    ]
    with contextlib.ExitStack() as stack:
        for other in others:
            data = _message(DType.F32, 500, trial.rank, other)
            stack.enter_context(trial.sending(data, DType.F32, other, 3))
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join(trial.timeout_s)
            trial.expect(not receiver.is_alive(), "a receive did not return")


def messages_beside_collectives(trial: Trial) -> None:
    """Another thread sends and receives while this one makes collectives."""
    before, after = _neighbours(trial)
    failures: list[str] = []

    def exchange() -> None:
        try:
            for number in range(5):
                with trial.sending(_message(DType.F32, 2000, trial.rank, number), DType.F32, after, 6):
                    _receive(trial, DType.F32, 2000, before, 6, number)
        except BaseException as error:
            failures.append(repr(error))

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    for _ in range(5):
        call = trial.call(Operation.ALL_REDUCE, DType.I32, (3001,))
        got = trial.do(call).data
        assert got is not None
        want = oracle.reduced(call.dtype, ReduceOp.SUM, trial.all_values(call))
        trial.expect_array(f"{call} beside messages", got, want, call.dtype)
    thread.join(trial.timeout_s)
    trial.expect(not thread.is_alive() and not failures, f"messages beside collectives failed: {failures}")


def a_message_of_another_size_is_dropped(trial: Trial) -> None:
    """The receiver gets an error, and then the next message."""
    trial.needs_ranks(2)
    if trial.rank == 1:
        for number, numel in enumerate((4, 4, 5)):
            data = _message(DType.F32, numel, 1, number)
            with trial.sending(data, DType.F32, 0, 8, may_disagree=number < 2):
                pass
    elif trial.rank == 0:
        for what, numel, dtype in (("size", 7, DType.F32), ("dtype", 4, DType.I32)):
            got = np.full(numel, 1, dtype.numpy)
            try:
                trial.backend.recv(got, dtype, 1, 8, trial.timeout_s)
            except Disagreement as error:
                trial.expect(str(trial.ranks[1]) in str(error), f"the error does not name the sender: {error}")
            else:
                trial.expect(False, f"a message of another {what} was taken")
            trial.expect((got == 1).all(), f"a message of another {what} was written to the array")
        _receive(trial, DType.F32, 5, 1, 8, 2)
    trial.healthy("messages of another size")


CASES = (
    a_ring_in_every_dtype_and_size,
    messages_of_one_tag_arrive_in_order,
    tags_are_distinguished,
    from_any_rank,
    everybody_to_everybody_from_many_threads,
    messages_beside_collectives,
    a_message_of_another_size_is_dropped,
)
