"""One stage of a collective: its own numbers, its deadline, and device memory through the host.

Tests of `collectives/backends/hierarchical/stage.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Call, GroupContext, Operation, Request
from axon_ps.collectives.backends.hierarchical.stage import Stage, on_device
from axon_ps.collectives.backends.mock import MockBackend, mock_contexts
from axon_ps.collectives.staging import Staging
from axon_ps.errors import Timeout
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.device import asarray, stand_in

LONG_S = 20.0


class Noting(MockBackend):
    """A backend of one rank that notes its calls; it takes host memory only, and doubles what it reduces."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(mock_contexts(1)[0])
        self.calls: list[Call] = []
        self.timeouts: list[float] = []
        self.fails = fails

    def run(self, request: Request, timeout_s: float) -> None:
        self.calls.append(request.call)
        self.timeouts.append(timeout_s)
        for array in (request.data, request.output):
            assert array is None or not on_device(array)
        if self.fails:
            raise Timeout("nobody came")
        if request.call.operation is Operation.ALL_REDUCE and request.data is not None:
            request.data *= 2
        elif request.output is not None:
            request.output[:] = request.data


class Counted(Staging):
    """Counts the buffers that are not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0

    def allocate(self, like: Array) -> Array:
        self.held += 1
        return super().allocate(like)

    def free(self, host: Array) -> None:
        self.held -= 1
        super().free(host)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with stand_in():
        yield


def arange(numel: int) -> Array:
    return np.arange(numel, dtype=np.float32)


def all_reduce(stage: Stage, data: Any, **options: Any) -> None:
    stage.run(
        Operation.ALL_REDUCE,
        DType.F32,
        time.monotonic() + LONG_S,
        counts=[data.size],
        data=data,
        op=ReduceOp.SUM,
        **options,
    )


def test_its_calls_have_numbers_of_their_own_and_the_time_that_is_left() -> None:
    backend = Noting()
    stage = Stage(backend)
    for _ in range(2):
        all_reduce(stage, arange(3))
    stage.run(Operation.BARRIER, DType.U8, time.monotonic() - 1.0)
    assert [call.sequence for call in backend.calls] == [0, 1, 2]
    assert backend.calls[0].counts == (3,)
    assert all(0.0 < timeout_s <= LONG_S for timeout_s in backend.timeouts)
    assert backend.timeouts[2] == 0.001


def test_device_memory_comes_back_with_the_result_and_no_buffer_is_held() -> None:
    staging = Counted()
    stage = Stage(Noting(), staging)
    on_gpu = asarray(arange(4))
    all_reduce(stage, on_gpu)
    assert on_gpu.get().tolist() == [0.0, 2.0, 4.0, 6.0]
    output = asarray(np.zeros(4, np.float32))
    stage.run(
        Operation.ALL_GATHER, DType.F32, time.monotonic() + LONG_S, counts=[4], data=asarray(arange(4)), output=output
    )
    assert output.get().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert staging.held == 0


def test_host_memory_is_not_staged() -> None:
    staging = Counted()
    data = arange(2)
    all_reduce(Stage(Noting(), staging), data)
    assert data.tolist() == [0.0, 2.0]
    assert staging.statistics()["downloaded_bytes"] == 0.0


@pytest.mark.parametrize("device", [True, False])
def test_what_comes_before_a_call_changes_the_data_that_is_sent(*, device: bool) -> None:
    def prepare(data: Array) -> None:
        data += 10

    data: Any = asarray(arange(2)) if device else arange(2)
    all_reduce(Stage(Noting(), Counted()), data, prepare=prepare)
    assert (data.get() if device else data).tolist() == [20.0, 22.0]


def test_a_call_that_fails_gives_its_buffers_back_and_changes_no_device_memory() -> None:
    staging = Counted()
    on_gpu = asarray(arange(2))
    with pytest.raises(Timeout, match="nobody came"):
        all_reduce(Stage(Noting(fails=True), staging), on_gpu)
    assert staging.held == 0
    assert on_gpu.get().tolist() == [0.0, 1.0]


class Messages(MockBackend):
    """Notes whether messages are in device memory."""

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self.on_device: list[bool] = []

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        self.on_device.append(on_device(data))
        super().send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        self.on_device.append(on_device(data))
        return super().recv(data, dtype, source, tag, timeout_s)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("device", [True, False])
def test_messages_of_device_memory_go_through_the_host_if_they_must(*, device: bool, staged: bool) -> None:
    backends = [Messages(context) for context in mock_contexts(2)]
    stagings = [Counted() if staged else None for _ in backends]
    first, second = (Stage(backend, staging) for backend, staging in zip(backends, stagings, strict=True))
    sent: Any = asarray(arange(3)) if device else arange(3)
    taken: Any = asarray(np.zeros(3, np.float32)) if device else np.zeros(3, np.float32)
    first.send(sent, DType.F32, 1, 0, LONG_S)
    assert second.recv(taken, DType.F32, 0, 0, LONG_S) == 0
    assert (taken.get() if device else taken).tolist() == [0.0, 1.0, 2.0]
    assert [backend.on_device for backend in backends] == [[device and not staged]] * 2
    assert all(staging is None or staging.held == 0 for staging in stagings)
