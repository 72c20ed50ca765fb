"""NcclBackend without a GPU: what is pure, what is said when there is none, and its logic over a fake NCCL.

Tests of `collectives/backends/nccl/calls.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Call, GroupContext, Operation, Request
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.nccl.backend import NcclBackend
from axon_ps.collectives.backends.nccl.symbols import AVERAGE, MAX, MIN, SUM, NcclUniqueId, nccl_op, version_of
from axon_ps.collectives.cuda import flat_view
from axon_ps.errors import InvalidRequest, NcclError
from axon_ps.types import DType, ReduceOp
from axon_ps_lab.conformance import DeviceBackend, run_in_threads
from axon_ps_lab.device import StandIn, asarray, stand_in


@pytest.fixture
def gpus() -> Iterator[StandIn]:
    with stand_in() as device:
        yield device


def test_numbers_of_nccl() -> None:
    assert nccl_op(ReduceOp.SUM, DType.F32) == SUM
    assert nccl_op(ReduceOp.MEAN, DType.BF16) == AVERAGE
    assert nccl_op(ReduceOp.SUM, DType.BOOL) == nccl_op(ReduceOp.BOR, DType.BOOL) == MAX
    assert nccl_op(ReduceOp.PRODUCT, DType.BOOL) == MIN
    assert nccl_op(ReduceOp.BXOR, DType.BOOL) is nccl_op(ReduceOp.BAND, DType.I64) is None


def test_versions_of_both_numberings() -> None:
    assert [version_of(c) for c in (2708, 21403, 22304)] == [(2, 7, 8), (2, 14, 3), (2, 23, 4)]


def test_a_unique_id_survives_the_store() -> None:
    for cupy, given in (("13.6.0", tuple(range(-64, 64))), ("14.0.0", bytes(range(128, 256)))):
        assert NcclUniqueId(NcclUniqueId.of(given).value).as_of(cupy) == given
    with pytest.raises(InvalidRequest, match="128 bytes; given were 3"):
        NcclUniqueId(b"abc")


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for act in (NcclBackend.generate_unique_id, NcclBackend.device_count, NcclBackend.nccl_version):
        with pytest.raises(NcclError, match=r"needs cupy.*axon-ps\[cuda12\]"):
            act()
    with pytest.raises(NcclError, match="needs cupy"):
        NcclBackend(NcclUniqueId(bytes(128)), 0, 1)


def test_without_a_gpu_the_error_says_so_on_every_rank() -> None:
    first, second = mock_contexts(2)
    with stand_in(devices=0):
        with pytest.raises(NcclError, match="GPU"):
            NcclBackend.create(first)
        with pytest.raises(NcclError, match="rank 0: .*GPU"):
            NcclBackend.create(second)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.usefixtures("gpus")
def test_conformance_over_a_stand_in_for_nccl(n: int) -> None:
    def make(context: GroupContext) -> DeviceBackend:
        return DeviceBackend(NcclBackend.create(context), asarray)

    reports = run_in_threads(n, make, exact_order=False)
    assert [failure for report in reports for failure in report.failures] == []


@pytest.mark.usefixtures("gpus")
def test_a_world_of_the_gpus_of_one_process() -> None:
    backends = NcclBackend.create_world([1, 0])
    assert [b.device for b in backends] == [1, 0]
    arrays = [asarray(np.arange(3, dtype=np.float32) + b.rank) for b in backends]
    call = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(3,), op=ReduceOp.SUM)

    def reduce(rank: int) -> None:
        backends[rank].run(Request(call=call, data=arrays[rank]), 5.0)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for backend, array in zip(backends, arrays, strict=True):
        assert array.get().tolist() == [1.0, 3.0, 5.0]
        backend.synchronize()
        backend.close()
        backend.close()
    assert NcclBackend.nccl_version() == (2, 23, 4)
    assert NcclBackend.device_count() == 8


@pytest.mark.usefixtures("gpus")
def test_flat_views_share_memory_and_must_be_contiguous() -> None:
    array = asarray(np.zeros((2, 3), np.uint16))
    flat_view(array, DType.BF16)[4] = 7
    assert array[1, 1] == 7
    with pytest.raises(InvalidRequest, match="contiguous"):
        flat_view(array[:, 1], DType.BF16)
