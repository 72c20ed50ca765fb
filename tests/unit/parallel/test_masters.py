"""Actions of all workers that have a model: results in rank order, or an error that every worker has.

Tests of `parallel/fsdp/masters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from axon_ps.errors import AxonError, CheckpointError, Disagreement, InvalidRequest, MemberLost
from axon_ps.parallel.fsdp.masters import Masters


class Known(Masters):
    """The worker of rank 0, beside others whose answers a test gives."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others = others
        self.sent: list[dict[str, Any]] = []

    def units(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        raise NotImplementedError

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return [value, *self.others]


def fine(value: Any) -> dict[str, Any]:
    return {"value": value, "error": "", "text": ""}


def failed(kind: type[Exception], text: str) -> dict[str, Any]:
    return {"value": None, "error": kind.__name__, "text": text}


def raising(error: BaseException) -> Callable[[], Any]:
    def perform() -> Any:
        raise error

    return perform


def test_values_of_all_workers_come_in_rank_order() -> None:
    assert Known(fine([2]), fine(None)).together("nothing was written", lambda: "mine") == ["mine", [2], None]


@pytest.mark.parametrize(
    ("theirs", "raised"),
    [
        (CheckpointError, CheckpointError),
        (MemberLost, MemberLost),
        (InvalidRequest, Disagreement),  # it blames arguments that were given there
        (KeyError, Disagreement),
    ],
)
def test_an_error_of_another_worker_is_raised_here_by_its_class_and_names_every_rank_that_failed(
    theirs: type[Exception], raised: type[AxonError]
) -> None:
    others = failed(theirs, "no space left"), fine(0), failed(theirs, "no such file")
    with pytest.raises(raised) as error:
        Known(*others).together("nothing was written, since that failed", lambda: None)
    assert type(error.value) is raised
    name = theirs.__name__
    assert str(error.value) == (
        f"nothing was written, since that failed on rank 1: {name}: no space left; rank 3: {name}: no such file"
    )


def test_the_own_error_is_raised_as_it_is_once_the_others_know_it() -> None:
    masters = Known(failed(CheckpointError, "theirs"))
    mine = ValueError("x" * 5000)
    with pytest.raises(ValueError, match="^x{5000}$") as error:
        masters.together("it failed", raising(mine))
    assert error.value is mine
    assert masters.sent == [{"value": None, "error": "ValueError", "text": "x" * 2000}]


def test_the_own_error_is_raised_though_the_others_cannot_be_told() -> None:
    class Gone(Known):
        def gather(self, value: Any) -> list[Any]:
            raise MemberLost("rank 1 is gone")

    with pytest.raises(ZeroDivisionError):
        Gone().together("it failed", raising(ZeroDivisionError()))
    with pytest.raises(MemberLost):
        Gone().together("it failed", lambda: None)
