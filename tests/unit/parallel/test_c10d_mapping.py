"""The process group of torch.distributed takes tensors, dtypes and operations, on groups of threads.

Tests of `parallel/c10d/sparse.py`.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, GatherOptions, HashStore, ScatterOptions

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import Disagreement, InvalidRequest
from axon_ps.parallel.c10d import coalesced
from axon_ps.parallel.c10d.process_group import AxonProcessGroup
from axon_ps.parallel.c10d.tensors import readable, writable

N = 3
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
REALS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def on_ranks(body: Callable[[AxonProcessGroup], Any]) -> list[Any]:
    """What `body` returns on each of `N` ranks; the first exception of any of them is raised."""
    results: list[Any] = [None] * N
    failures: list[BaseException] = []

    def run(rank: int, mine: ProcessGroup) -> None:
        try:
            group = AxonProcessGroup(mine, HashStore(), timeout_s=5.0, on_shutdown=lambda: None, split=no_split)
            results[rank] = body(group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i, mine)) for i, mine in enumerate(ProcessGroup.mock(N))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def no_split(ranks: list[int], name: str, timeout_s: float) -> AxonProcessGroup:
    raise NotImplementedError


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def all_reduced(tensor: Callable[[int], Tensor], op: Any, *, asynchronous: bool = False) -> Tensor:
    def body(group: AxonProcessGroup) -> Tensor:
        mine = tensor(group.rank())
        opts = options(dist.AllreduceOptions, reduceOp=op, asyncOp=asynchronous)
        group.allreduce([mine], opts).wait()
        return mine

    results = on_ranks(body)
    for result in results[1:]:
        assert torch.equal(as_bytes(result), as_bytes(results[0]))
    return results[0]  # type: ignore[no-any-return]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------- dtypes and operations


@pytest.mark.parametrize("dtype", [*REALS, *INTEGERS], ids=str)
def test_every_dtype_is_summed_and_ordered(dtype: torch.dtype) -> None:
    def values(rank: int) -> Tensor:
        return torch.tensor([rank, 2, 5 - rank]).to(dtype)

    assert all_reduced(values, dist.ReduceOp.SUM).double().tolist() == [3, 6, 12]
    assert all_reduced(values, dist.ReduceOp.MIN).double().tolist() == [0, 2, 3]
    assert all_reduced(values, dist.ReduceOp.MAX, asynchronous=True).double().tolist() == [2, 2, 5]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_around_and_have_bits(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max

    def largest(rank: int) -> Tensor:
        return torch.tensor([top], dtype=dtype)

    result = int(all_reduced(largest, dist.ReduceOp.SUM).view(-1)[0].item())
    bits = 8 * dtype.itemsize
    assert result % (1 << bits) == 3 * top % (1 << bits)
    assert int(all_reduced(largest, dist.ReduceOp.MAX).item()) == top

    def patterns(rank: int) -> Tensor:
        return torch.tensor([1 << rank, 3], dtype=dtype)

    assert [all_reduced(patterns, op).tolist() for op in BITWISE] == [[0, 3], [7, 3], [7, 3]]


def test_complex_numbers_have_sums_and_averages_only() -> None:
    def numbers(rank: int) -> Tensor:
        return torch.tensor([rank + 1j])

    assert all_reduced(numbers, dist.ReduceOp.SUM).tolist() == [3 + 3j]
    assert all_reduced(numbers, dist.ReduceOp.AVG).tolist() == [1 + 1j]

    def conjugate(rank: int) -> Tensor:
        return torch.tensor([rank + 1j]).conj()

    assert all_reduced(conjugate, dist.ReduceOp.SUM).tolist() == [3 - 3j]
    with pytest.raises(InvalidRequest, match="complex"):
        all_reduced(numbers, dist.ReduceOp.MAX)


def test_averages_and_premultiplied_sums() -> None:
    def values(rank: int) -> Tensor:
        return torch.tensor([rank, 1.0])

    assert all_reduced(values, dist.ReduceOp.AVG).tolist() == [1, 1]
    assert all_reduced(values, dist._make_nccl_premul_sum(2.0)).tolist() == [6, 6]
    assert all_reduced(values, dist.ReduceOp.PRODUCT).tolist() == [0, 1]
    with pytest.raises(InvalidRequest, match="average of i64"):
        all_reduced(lambda rank: torch.tensor([rank]), dist.ReduceOp.AVG)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch before 2.13, also when it was told not to check
def test_sparse_tensors_are_summed() -> None:
    def gradient(rank: int) -> Tensor:
        return torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (4,), check_invariants=False)

    def body(group: AxonProcessGroup) -> Any:
        total, average = gradient(group.rank()), gradient(group.rank())
        group.allreduce([total]).wait()
        group.allreduce([average], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait()
        return total.to_dense().tolist(), (average.to_dense() * 3).tolist()

    assert on_ranks(body) == [([5, 2, 2, 0], [5, 2, 2, 0])] * N


# ---------------------------------------------------------------------- layouts and lists


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float8_e4m3fn, torch.int16, torch.complex64, torch.bool], ids=str
)
def test_data_moves_in_any_dtype_and_layout(dtype: torch.dtype) -> None:
    def body(group: AxonProcessGroup) -> None:
        rank = group.rank()

        def mine(r: int) -> Tensor:
            return (torch.arange(6).reshape(2, 3).t() + r).to(dtype)

        sent = mine(2) if rank == 2 else torch.zeros(2, 3).t().to(dtype)
        group.broadcast([sent], options(dist.BroadcastOptions, rootRank=2)).wait()
        assert torch.equal(as_bytes(sent), as_bytes(mine(2)))

        uneven = [torch.empty(r + 1).to(dtype) for r in range(N)]
        group.allgather([uneven], [torch.full((rank + 1,), rank).to(dtype)]).wait()
        assert [t.double().tolist() if not dtype.is_complex else t.real.tolist() for t in uneven] == [
            [float(bool(r) if dtype is torch.bool else r)] * (r + 1) for r in range(N)
        ]

        output = torch.empty(3 * N, 2).to(dtype)
        group.all_gather_single(output, mine(rank), options(AllgatherOptions, asyncOp=True)).wait()
        assert torch.equal(as_bytes(output), as_bytes(torch.cat([mine(r) for r in range(N)])))

        gathered = [torch.empty(3, 2).to(dtype) for _ in range(N)] if rank == 1 else []
        group.gather([gathered] if gathered else [], [mine(rank)], options(GatherOptions, rootRank=1)).wait()
        assert all(torch.equal(as_bytes(t), as_bytes(mine(r))) for r, t in enumerate(gathered))
        joined = torch.empty(N if rank == 1 else 0, 3, 2).to(dtype)
        group.gather_single(joined, mine(rank), options(GatherOptions, rootRank=1)).wait()
        assert all(torch.equal(as_bytes(t), as_bytes(mine(r))) for r, t in enumerate(joined))

        scattered = torch.empty(2, 3).t().to(dtype)
        parts = [[mine(r) for r in range(N)]] if rank == 0 else []
        group.scatter([scattered], parts, options(ScatterOptions, rootRank=0)).wait()
        assert torch.equal(as_bytes(scattered), as_bytes(mine(rank)))

        received = torch.empty(N, 2).to(dtype)
        group.all_to_all_single(received, torch.stack([mine(rank)[i] for i in range(N)]), [], []).wait()
        assert torch.equal(as_bytes(received), as_bytes(torch.stack([mine(r)[rank] for r in range(N)])))

        outputs = [torch.empty(rank + 1).to(dtype) for _ in range(N)]
        group.alltoall(outputs, [torch.full((r + 1,), rank).to(dtype) for r in range(N)]).wait()
        assert all(
            torch.equal(as_bytes(t), as_bytes(torch.full((rank + 1,), r).to(dtype))) for r, t in enumerate(outputs)
        )

        if rank == 0:
            group.send([mine(7)], 1, 5).wait()
        elif rank == 1:
            message = torch.empty(3, 2).to(dtype)
            work = group.recv_anysource([message], 5)
            work.wait()
            assert (work._source_rank(), torch.equal(as_bytes(message), as_bytes(mine(7)))) == (0, True)

    on_ranks(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint64], ids=str)
def test_reduce_scatter_and_reduce(dtype: torch.dtype) -> None:
    def body(group: AxonProcessGroup) -> None:
        rank = group.rank()
        output = torch.empty(2).to(dtype)
        group.reduce_scatter_single(output, torch.arange(6).to(dtype)).wait()
        assert output.double().tolist() == [6 * rank, 6 * rank + 3]
        lists = [[torch.full((r + 1,), rank).to(dtype) for r in range(N)]]
        part = torch.empty(rank + 1).to(dtype)
        opts = options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.MAX)
        group.reduce_scatter([part], lists, opts).wait()
        assert part.double().tolist() == [2] * (rank + 1)
        mine = torch.tensor([rank]).to(dtype)
        group.reduce([mine], options(dist.ReduceOptions, rootRank=1)).wait()
        assert mine.double().tolist() == [3 if rank == 1 else rank]

    on_ranks(body)


def test_lists_in_one_storage_are_not_copied() -> None:
    storage = torch.arange(10.0)
    parts = list(storage[2:].split([3, 1, 4]))
    assert readable(*parts).data_ptr() == parts[0].data_ptr()
    assert writable(*parts).flat.data_ptr() == parts[0].data_ptr()
    apart = [storage[:2], storage[3:4]]
    buffer = writable(*apart)
    buffer.flat.copy_(torch.tensor([7.0, 8.0, 9.0]))
    buffer.finish()
    assert storage[:4].tolist() == [7, 8, 2, 9]


# ---------------------------------------------------------------------- coalescing, handles, errors


def test_small_tensors_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced, "PACKED_BYTES", 16)

    def body(group: AxonProcessGroup) -> tuple[Any, ...]:
        rank, calls = group.rank(), group.group.sequence
        tensors = [torch.ones(2), torch.ones(9), torch.ones(3), torch.full((2,), rank), torch.ones(1) * rank]
        group.allreduce_coalesced(tensors).wait()
        reduced = group.group.sequence - calls
        outputs = [torch.empty(2 * N), torch.empty(N)]
        group.all_gather_single_coalesced(outputs, [torch.full((2,), float(rank)), torch.tensor([-1.0])]).wait()
        parts = [torch.empty(2), torch.empty(1)]
        group.reduce_scatter_single_coalesced(parts, [torch.arange(6.0), torch.arange(3.0)]).wait()
        lists = [[torch.empty(1), torch.empty(2)] for _ in range(N)]
        group.allgather_coalesced(lists, [torch.tensor([float(rank)]), torch.zeros(2)]).wait()
        packed = group.group.sequence - calls - reduced
        assert [t[0].item() for t in tensors] == [3, 3, 3, 3, 3]
        assert [t.tolist() for t in outputs] == [[0, 0, 1, 1, 2, 2], [-1, -1, -1]]
        assert [t.tolist() for t in parts] == [[6 * rank, 6 * rank + 3], [3 * rank]]
        assert [part[0].item() for part, _ in lists] == [0, 1, 2]
        return reduced, packed

    assert on_ranks(body) == [(3, 3)] * N  # f32 small ones together, the large one, the integers


def test_coalescing_begins_everything_and_gives_one_handle() -> None:
    def body(group: AxonProcessGroup) -> list[float]:
        tensors = [torch.ones(2), torch.ones(3)]
        group._start_coalescing(torch.device("cpu"))
        for tensor in tensors:
            group.allreduce([tensor], options(dist.AllreduceOptions, asyncOp=False))
        work = group._end_coalescing(torch.device("cpu"))
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        return [t[0].item() for t in work.get_future().wait()]

    assert on_ranks(body) == [[3, 3]] * N


def test_futures_give_tensors_and_call_back() -> None:
    def body(group: AxonProcessGroup) -> list[float]:
        work = group.allreduce([torch.ones(2)])
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        return doubled.wait().tolist()  # type: ignore[no-any-return]

    assert on_ranks(body) == [[6, 6]] * N


def test_callbacks_of_futures_begin_collectives_and_wait_for_them() -> None:
    """As torch's PowerSGD hook does, whose callbacks are three deep; also of several operations as one."""

    def body(group: AxonProcessGroup) -> list[float]:
        def again(future: Any) -> Tensor:
            tensors = future.wait()
            work = group.allreduce([tensors[0] if isinstance(tensors, list) else tensors])
            return work.get_future().then(lambda inner: inner.value()[0]).wait()  # type: ignore[no-any-return]

        three = group.allreduce([torch.ones(1)]).get_future().then(again).then(again).then(again)
        value = three.wait().item()
        group._start_coalescing(torch.device("cpu"))
        for _ in range(2):
            group.allreduce([torch.ones(1)])
        both = group._end_coalescing(torch.device("cpu")).get_future().then(again)
        return [value, both.wait().item()]

    assert on_ranks(body) == [[81, 9]] * N


class Wrapped(torch.Tensor):
    """A tensor whose elements are those of another one."""

    @staticmethod
    def __new__(cls) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, (4,))
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("its elements were asked for")


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "quantised": (lambda: torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=torch.quint8), "dequant"),
    "meta": (lambda: torch.ones(4, device="meta"), "on meta"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]), "nested"),
    "a class that holds others": (Wrapped, "a Wrapped"),
    "freed": (freed, "freed or resized"),
}
ROOT: dict[str, Any] = {"rootRank": 0}
ENTRIES: dict[str, Callable[[AxonProcessGroup, Tensor], object]] = {
    "allreduce": lambda g, t: g.allreduce([t]),
    "allreduce_coalesced": lambda g, t: g.allreduce_coalesced([t, t]),
    "reduce": lambda g, t: g.reduce([t], options(dist.ReduceOptions, **ROOT)),
    "broadcast": lambda g, t: g.broadcast([t], options(dist.BroadcastOptions, **ROOT)),
    "all_gather_single": lambda g, t: g.all_gather_single(t, t),
    "all_gather_single_coalesced": lambda g, t: g.all_gather_single_coalesced([t, t], [t, t]),
    "allgather": lambda g, t: g.allgather([[t]], [t]),
    "allgather_coalesced": lambda g, t: g.allgather_coalesced([[t, t]], [t, t]),
    "reduce_scatter": lambda g, t: g.reduce_scatter([t], [[t]]),
    "reduce_scatter_single": lambda g, t: g.reduce_scatter_single(t, t),
    "reduce_scatter_single_coalesced": lambda g, t: g.reduce_scatter_single_coalesced([t, t], [t, t]),
    "gather": lambda g, t: g.gather([[t]], [t], options(GatherOptions, **ROOT)),
    "gather_single": lambda g, t: g.gather_single(t, t, options(GatherOptions, **ROOT)),
    "scatter": lambda g, t: g.scatter([t], [[t]], options(ScatterOptions, **ROOT)),
    "alltoall": lambda g, t: g.alltoall([t], [t]),
    "all_to_all_single": lambda g, t: g.all_to_all_single(t, t, [4], [4]),
    "send": lambda g, t: g.send([t], 0),
    "recv": lambda g, t: g.recv([t], 0),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_as_bytes_is_refused_by_every_entry(kind: str) -> None:
    make, message = UNREADABLE[kind]
    with warnings.catch_warnings(action="ignore"):  # quantised ones will go, the others are new
        tensor = make()
    mine = ProcessGroup.mock()
    group = AxonProcessGroup(mine, HashStore(), timeout_s=5.0, on_shutdown=lambda: None, split=no_split)
    for name, entry in ENTRIES.items():
        if (kind, name) in {("csr", "all_to_all_single"), ("nested", "all_to_all_single")}:
            continue  # torch's own: it has no rows
        with pytest.raises(InvalidRequest, match=message):
            entry(group, tensor)
    with pytest.raises(InvalidRequest):
        mine.all_reduce(tensor)
    methods = {name: found for name, found in vars(AxonProcessGroup).items() if inspect.isfunction(found)}
    takes_tensors = {name for name, found in methods.items() if "Tensor" in str(found.__annotations__)}
    same = {"gather_into_tensor", "alltoall_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
    private = {"_allgather_base", "_reduce_scatter_base"}
    assert takes_tensors - same - private - {"recv_anysource", "recvAnysource"} == ENTRIES.keys()
    mine.close()


def test_errors_come_out_of_handles_and_futures() -> None:
    def body(group: AxonProcessGroup) -> None:
        wrong = torch.ones(2 + (group.rank() == 1))
        work = group.allreduce([wrong])
        with pytest.raises(Disagreement, match=r"rank 1: all_reduce\(sum\) of 3 f32"):
            work.wait()
        assert isinstance(work.exception(), Disagreement)
        assert not work.is_success()
        with pytest.raises(RuntimeError, match=r"Disagreement: .*rank 1: all_reduce\(sum\) of 3 f32"):
            group.allreduce([wrong]).get_future().wait()
        with pytest.raises(InvalidRequest, match="list of 2 tensors"):
            group.allgather([[torch.ones(1)] * 2], [torch.ones(1)])
        with pytest.raises(InvalidRequest, match="do not divide equally"):
            group.all_to_all_single(torch.ones(4), torch.ones(4))
        group.barrier().wait()

    on_ranks(body)
