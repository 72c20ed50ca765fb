"""NcclBackend on real GPUs: the conformance suite with as many ranks as there are GPUs, threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from axon_ps.collectives.backends.base import Call, GroupContext, Operation, Request
from axon_ps.collectives.backends.nccl.backend import NcclBackend
from axon_ps.collectives.cuda import flat_view
from axon_ps.errors import AxonError
from axon_ps.types import DType, ReduceOp
from axon_ps_lab.conformance import DeviceBackend, run_in_threads

pytestmark = pytest.mark.gpu


def devices() -> int:
    """GPUs that NCCL can use; skips the test, with the reason, where there is none."""
    try:
        return NcclBackend.device_count()
    except AxonError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("n", [1, 2])
def test_conformance_over_nccl(n: int) -> None:
    if devices() < n:
        pytest.skip(f"needs {n} GPUs; there is {devices()}")
    cupy: Any = pytest.importorskip("cupy")

    def make(context: GroupContext) -> DeviceBackend:
        device = context.rank

        def to_device(array: Any) -> Any:
            with cupy.cuda.Device(device):
                return cupy.asarray(array)

        return DeviceBackend(NcclBackend.create(context, device=device), to_device)

    reports = run_in_threads(n, make, exact_order=False)
    assert [failure for report in reports for failure in report.failures] == []


def test_torch_tensors_are_reduced_where_they_are() -> None:
    devices()
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    backend = NcclBackend(NcclBackend.generate_unique_id(), 0, 1, 0)
    for torch_dtype, dtype in ((torch.bfloat16, DType.BF16), (torch.bool, DType.BOOL), (torch.float64, DType.F64)):
        tensor = torch.ones(2, 3, dtype=torch_dtype, device="cuda")
        flat = flat_view(tensor, dtype)
        call = Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=dtype, counts=(6,), op=ReduceOp.SUM)
        backend.run(Request(call=call, data=flat), 30.0)
        flat[4] = 0
        backend.synchronize()
        assert tensor.flatten().tolist() == [1, 1, 1, 1, 0, 1]
    backend.close()


def test_an_abort_is_prompt() -> None:
    if devices() < 2:
        pytest.skip("needs 2 GPUs: a rank alone never waits")
    first, second = NcclBackend.create_world([0, 1])
    call = Call(sequence=0, operation=Operation.BARRIER, dtype=DType.U8)
    timer = threading.Timer(0.2, first.abort, [AxonError("enough")])
    timer.start()
    with pytest.raises(AxonError, match="enough"):
        first.run(Request(call=call), 30.0)
    timer.join()
    first.close()
    second.abort(AxonError("enough"))
    second.close()


def test_what_this_machine_has() -> None:
    assert devices() >= 1
    major, minor, patch = NcclBackend.nccl_version()
    assert (major, minor, patch) >= (2, 7, 0)
