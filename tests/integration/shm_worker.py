"""One rank of a group on this host, for the tests of the shared-memory backend: `play` a scenario, a function of this
module.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.collectives.backends.base import Operation, Request
from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend
from axon_ps.errors import AxonError, MemberLost
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.reduction import ops
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.campaigns.shm_ranks import TIMEOUT_S, DirectoryStore, Rank, context
from axon_ps_lab.conformance import oracle


@functools.lru_cache(128)
def values(rank: int, numel: int, dtype: DType, salt: int = 0) -> Array:
    """A rank's contribution, read-only: every rank can make everybody's, and does so once."""
    made = _values(rank, numel, dtype, salt)
    made.setflags(write=False)
    return made


def _values(rank: int, numel: int, dtype: DType, salt: int) -> Array:
    random = np.random.default_rng(1000 * salt + rank)
    if dtype is DType.INT8_BLOCK:
        return oracle.values(dtype, numel, salt, rank)
    if dtype is DType.BOOL:
        return random.integers(0, 2, numel).astype(np.bool_)
    if dtype is DType.BF16:
        return (random.standard_normal(numel).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.is_float:
        return random.standard_normal(numel).astype(dtype.numpy)
    return random.integers(0, 100, numel).astype(dtype.numpy)


@functools.lru_cache(16)
def reduced(n: int, numel: int, op: ReduceOp, dtype: DType, salt: int = 0) -> Array:
    """The reduction of the contributions of `n` ranks, read-only."""
    out = np.empty(numel, dtype.numpy)
    ops.reduce_into(out, [values(r, numel, dtype, salt) for r in range(n)], op, dtype)
    out.setflags(write=False)
    return out


def same(what: str, got: Array, expected: Array) -> None:
    if got.tobytes() != expected.tobytes():
        raise AssertionError(f"{what}: {got[:8]}... is not {expected[:8]}...")


def check_all(rank: Rank, dtype: DType, numel: int, op: ReduceOp) -> None:
    """Every collective once, against the oracle, to the bit."""
    b, me, n = rank.backend, rank.rank, rank.n
    root = numel % n
    what = f"{dtype.value}[{numel}] {op.value}, {n} ranks"
    data = rank.array(values(me, numel, dtype), dtype)
    b.run(Request(call=rank.call(Operation.ALL_REDUCE, dtype, (numel,), op=op), data=data), TIMEOUT_S)
    same(f"all_reduce {what}", data, reduced(n, numel, op, dtype))

    data = rank.array(values(me, numel, dtype), dtype)
    b.run(Request(call=rank.call(Operation.REDUCE, dtype, (numel,), op=op, root=root), data=data), TIMEOUT_S)
    same(f"reduce {what}", data, reduced(n, numel, op, dtype) if me == root else values(me, numel, dtype))

    data = rank.array(values(me, numel, dtype), dtype)
    b.run(Request(call=rank.call(Operation.BROADCAST, dtype, (numel,), root=root), data=data), TIMEOUT_S)
    same(f"broadcast {what}", data, values(root, numel, dtype))

    counts = tuple(numel // n + (3 * r if numel else 0) for r in range(n))
    begins = [0, *itertools.accumulate(counts)]
    everything = np.concatenate([values(r, counts[r], dtype) for r in range(n)])
    mine = slice(begins[me], begins[me + 1])
    for in_place in (False, True):
        output = rank.array(np.zeros_like(everything), dtype)
        data = rank.array(values(me, counts[me], dtype), dtype)
        if in_place:
            output[mine] = data
            data = output[mine]
        b.run(Request(call=rank.call(Operation.ALL_GATHER, dtype, counts), output=output, data=data), TIMEOUT_S)
        same(f"all_gather {what}", output, everything)

        data = rank.array(values(me, begins[-1], dtype), dtype)
        part = data[mine] if in_place else rank.array(np.zeros(counts[me], dtype.numpy), dtype)
        b.run(
            Request(call=rank.call(Operation.REDUCE_SCATTER, dtype, counts, op=op), output=part, data=data), TIMEOUT_S
        )
        same(f"reduce_scatter {what}", part, reduced(n, begins[-1], op, dtype)[mine])

    output = rank.array(np.zeros_like(everything), dtype) if me == root else None
    data = rank.array(values(me, counts[me], dtype), dtype)
    b.run(Request(call=rank.call(Operation.GATHER, dtype, counts, root=root), output=output, data=data), TIMEOUT_S)
    if output is not None:
        same(f"gather {what}", output, everything)

    data = rank.array(everything, dtype)
    part = rank.array(np.zeros(counts[me], dtype.numpy), dtype)
    b.run(
        Request(
            call=rank.call(Operation.SCATTER, dtype, counts, root=root), output=part, data=data if me == root else None
        ),
        TIMEOUT_S,
    )
    same(f"scatter {what}", part, everything[mine])

    # Rank i sends (i + 2 j) % 5 sevenths of its array to rank j.
    sent = [[(i + 2 * j) % 5 * numel // 7 for j in range(n)] for i in range(n)]
    data = rank.array(values(me, sum(sent[me]), dtype), dtype)
    received = [sent[i][me] for i in range(n)]
    output = rank.array(np.zeros(sum(received), dtype.numpy), dtype)
    b.run(
        Request(
            call=rank.call(Operation.ALL_TO_ALL, dtype),
            output=output,
            data=data,
            output_counts=tuple(received),
            input_counts=tuple(sent[me]),
        ),
        TIMEOUT_S,
    )
    parts = [values(i, sum(sent[i]), dtype)[sum(sent[i][:me]) :][: sent[i][me]] for i in range(n)]
    same(f"all_to_all {what}", output, np.concatenate(parts))

    b.run(Request(call=rank.call(Operation.BARRIER, DType.U8)), TIMEOUT_S)
    peer, source = (me + 1) % n, (me - 1) % n
    data, output = rank.array(values(me, numel, dtype), dtype), rank.array(np.zeros(numel, dtype.numpy), dtype)
    if n > 1:
        turns = [lambda: b.send(data, dtype, peer, 7, TIMEOUT_S), lambda: b.recv(output, dtype, source, 7, TIMEOUT_S)]
        for turn in turns if me % 2 == 0 else reversed(turns):
            turn()
        same(f"send and recv {what}", output, values(source, numel, dtype))


def everything(rank: Rank, options: dict[str, Any]) -> Any:
    """All dtypes, sizes around every border, all operations."""
    for dtype in map(DType, options["dtypes"]):
        for numel in options["numels"]:
            small = min(numel, 2000) if dtype is DType.INT8_BLOCK else numel
            check_all(rank, dtype, small, ReduceOp.SUM)
    for op in map(ReduceOp, options["ops"]):
        dtype = DType.I32 if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) else DType.F32
        check_all(rank, dtype, options["numels"][-1], op)
        if dtype is DType.F32:
            check_all(rank, DType.BF16, 13, op)
    return rank.backend.statistics()


def all_reduce(rank: Rank, data: Array, timeout_s: float = TIMEOUT_S) -> None:
    rank.backend.run(
        Request(call=rank.call(Operation.ALL_REDUCE, DType.F32, (data.size,), op=ReduceOp.MAX), data=data), timeout_s
    )


def failing(what: Callable[[], object]) -> dict[str, Any]:
    """What a call raises, and after how long."""
    began = time.monotonic()
    try:
        what()
    except AxonError as error:
        return {"error": type(error).__name__, "text": str(error), "waited_s": time.monotonic() - began}
    return {"error": None, "waited_s": time.monotonic() - began}


def kill(rank: Rank, options: dict[str, Any]) -> Any:
    """All-reduce until a rank is killed, at a random moment; the others say after how long they knew, and what."""
    data = rank.array(np.ones(options["numel"], np.float32), DType.F32)
    if rank.rank == options["victim"]:
        threading.Timer(options["after_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        told = failing(lambda: all_reduce(rank, data))
        if told["error"]:
            return {**told, "again": failing(lambda: all_reduce(rank, data[:1]))}


def disagree(rank: Rank, options: dict[str, Any]) -> Any:
    """The last rank asks for something else, small and large, again and again; then all agree again."""
    b, odd, told = rank.backend, rank.rank == rank.n - 1, []
    for numel in (4, 50_000):
        data = np.full(numel, float(rank.rank), np.float32)
        before = data.copy()
        for change in ({"op": ReduceOp.MIN}, {"dtype": DType.I32}, {"counts": (numel - 1,)}, {"sequence": 99}):
            call = rank.call(Operation.ALL_REDUCE, DType.F32, (numel,), op=ReduceOp.SUM)
            if odd:
                call = replace(call, **change)
            mine = data[: call.counts[0]].view(call.dtype.numpy)
            told.append(failing(lambda call=call, mine=mine: b.run(Request(call=call, data=mine), TIMEOUT_S)))
        root = rank.call(Operation.BROADCAST, DType.F32, (numel,), root=1 if odd else 0)
        told.append(failing(lambda root=root, data=data: b.run(Request(call=root, data=data), TIMEOUT_S)))
        call = rank.call(Operation.ALL_REDUCE, DType.F32, (numel,), op=ReduceOp.SUM)
        if odd:
            told.append(
                failing(lambda call=call: b.run(Request(call=replace(call, operation=Operation.BARRIER, counts=())), 9))
            )
        else:
            told.append(failing(lambda call=call, data=data: b.run(Request(call=call, data=data), TIMEOUT_S)))
        inputs = [numel] * rank.n
        outputs = [numel + int(odd and r == 0) for r in range(rank.n)]
        parts = np.zeros(sum(inputs), np.float32), np.zeros(sum(outputs), np.float32)
        call = rank.call(Operation.ALL_TO_ALL, DType.F32)
        told.append(
            failing(
                lambda c=call, p=parts, o=outputs, i=inputs: b.run(
                    Request(call=c, output=p[1], data=p[0], output_counts=tuple(o), input_counts=tuple(i)), TIMEOUT_S
                )
            )
        )
        same("after disagreements", data, before)
        all_reduce(rank, data)
        same("agreeing again", data, np.full(numel, float(rank.n - 1), np.float32))
    small, large = np.zeros(4, np.float32), np.zeros(100_000, np.float32)
    for data in (small, large):
        if rank.rank == 0:
            outcome = failing(lambda data=data: b.send(data, DType.F32, 1, 3, TIMEOUT_S))
        elif rank.rank == 1:
            outcome = failing(lambda data=data: b.recv(data[1:], DType.F32, 0, 3, TIMEOUT_S))
        else:
            continue
        if not (rank.rank == 0 and data is small):  # an eager message has long left
            told.append(outcome)
    return told


def late(rank: Rank, options: dict[str, Any]) -> Any:
    """The last rank never comes; the others name it, once by its own timeout and then at once."""
    if rank.rank == rank.n - 1:
        time.sleep(options["timeout_s"] * 1.5)
        return failing(lambda: all_reduce(rank, np.zeros(4, np.float32)))
    first = failing(lambda: all_reduce(rank, np.zeros(options["numel"], np.float32), options["timeout_s"]))
    return {**first, "again": failing(lambda: all_reduce(rank, np.zeros(4, np.float32)))}


def late_recv(rank: Rank, options: dict[str, Any]) -> Any:
    """A message that nobody sends."""
    if rank.rank:
        return failing(lambda: rank.backend.run(Request(call=rank.call(Operation.BARRIER, DType.U8)), TIMEOUT_S))
    return failing(lambda: rank.backend.recv(np.zeros(4, np.float32), DType.F32, 1, 0, options["timeout_s"]))


def abort(rank: Rank, options: dict[str, Any]) -> Any:
    """Rank 0 aborts from another thread while all wait, some in a collective and some in a recv."""
    clock = 0.0

    def end() -> None:
        nonlocal clock
        clock = time.monotonic()
        rank.backend.abort(MemberLost("rank 77 has left the job"))

    if rank.rank == 0:
        threading.Timer(0.2, end).start()
    if rank.rank == rank.n - 1:
        told = failing(lambda: rank.backend.recv(np.zeros(4, np.float32), DType.F32, -1, 0, TIMEOUT_S))
    else:
        told = failing(lambda: all_reduce(rank, np.zeros(4, np.float32)))
    return {**told, "at": time.monotonic(), "aborted_at": clock}


def too_little(rank: Rank, options: dict[str, Any]) -> Any:
    """There is no memory for the slots."""
    return failing(lambda: all_reduce(rank, np.zeros(options["numel"], np.float32)))


def messages(rank: Rank, options: dict[str, Any]) -> Any:
    """Messages of many sizes and tags from two threads, received out of order, beside a stream of collectives."""
    b, me, n = rank.backend, rank.rank, rank.n
    sizes = [1, 100, 3000, 40_000, 200_000]

    def payload(source: int, tag: int, i: int) -> Array:
        return np.full(sizes[i % len(sizes)], 1000 * source + 100 * tag + i, np.int64)

    def post(tag: int) -> None:
        for i in range(options["count"]):
            for to in range(n):
                if to != me:
                    b.send(rank.array(payload(me, tag, i), DType.I64), DType.I64, to, tag, TIMEOUT_S)

    def take(tag: int) -> None:
        for i in range(options["count"]):
            for source in reversed(range(n)):
                if source != me:
                    out = np.zeros(sizes[i % len(sizes)], np.int64)
                    assert b.recv(out, DType.I64, source, tag, TIMEOUT_S) == source
                    same(f"message {i} of {source}", out, payload(source, tag, i))

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(turn, tag) for tag in (1, 2) for turn in (post, take)]
        for size in (3, 50_000) * options["count"]:
            data = np.full(size, float(me), np.float32)
            all_reduce(rank, data)
            same("all_reduce beside messages", data, np.full(size, float(n - 1), np.float32))
        for future in done:
            future.result()
    if me:
        b.send(np.array([me], np.int32), DType.I32, 0, 9, TIMEOUT_S)
        return None
    who, came = np.zeros(1, np.int32), set()
    for _ in range(n - 1):
        source = b.recv(who, DType.I32, -1, 9, TIMEOUT_S)
        assert source == who[0]
        came.add(source)
    return sorted(came)


def registered_memory(rank: Rank, options: dict[str, Any]) -> Any:
    """How many shared mappings there are while a registered array is in use, and after it has gone."""

    def mappings() -> int:
        return sum("memfd:axon_ps" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    if options.get("gradient"):  # made for shard servers, as `ShardGroup.buffer` does
        data = shared_arrays.buffer(400_000).view(np.float32)
        data[:] = rank.rank
    else:
        data = rank.array(np.full(100_000, float(rank.rank), np.float32), DType.F32)
    if options["only"] in (-1, rank.rank):
        all_reduce(rank, data)
        result = data
    else:
        result = data.copy()
        all_reduce(rank, result)
    same("registered", result, np.full(data.size, float(rank.n - 1), np.float32))
    during = mappings()
    mapped = rank.backend.statistics()["bytes_mapped"]
    del data, result
    for _ in range(2):  # the first tells, the second knows
        all_reduce(rank, np.zeros(100_000, np.float32))
    return {"before": before, "during": during, "after": mappings(), "mapped": mapped}


def play(directory: Path, rank: int, n: int, scenario: str, options: dict[str, Any]) -> Any:
    """Be one rank of a group of `n`, which meets in a directory; returns what the scenario does."""
    try:
        backend = SharedMemoryBackend(context(DirectoryStore(directory), rank, n), **options.get("backend", {}))
    except AxonError as error:
        return {"error": type(error).__name__, "text": str(error)}
    result = globals()[scenario](Rank(backend, options.get("registered", False)), options)
    backend.close()
    return result
