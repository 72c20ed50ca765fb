"""Optimizer kernels of axon_ps against torch's, on the same parameters, in the same minutes.

    python benchmarks/kernels.py [--quick] [--piece-numel N]

Every optimizer updates 64M f32 parameters with 2 threads. axon_ps runs as in a shard server: threads take pieces (1M
elements by default, the server's run of chunks) until none are left. Its columns are:

- without a wire copy;
- with the bf16 wire copy, which goes to a scratch array of the thread;
- with the frames that a server makes of that copy, ready to be sent and retained until the next step.

torch runs its fused implementation where it has one for CPUs, else foreach. For Lion, which torch lacks, it runs the
usual sequence of `torch._foreach_*` calls. The column "torch ms" makes no bf16 copy; the next column makes one, with
`copy_` after the step.

Both sides work on the same arrays: the speed of memory depends on its pages, by a third here. Calls alternate in
rounds, so a noisy neighbour affects all of them equally. A ratio is the median of the ratios within a round, since
memory is twice as fast here in some seconds as in others. The table has the median times; the file also has the
fastest.

The server's gradient work is measured, too: adding a bf16 chunk in f32, with and without the sum of squares.

The acceptance is an update with bf16 copy ≤ 1.2 × torch's fused update without.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from axon_ps.compress import cast
from axon_ps.host.malloc import retain_message_memory
from axon_ps.optim import create
from axon_ps.shard.core.chunks import BLOCK_NUMEL
from axon_ps.shard.server.apply import RUN_NUMEL
from axon_ps.sharding.plan import DEFAULT_CHUNK_NUMEL
from axon_ps.types import Array, DType
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2
from axon_ps_lab import report

THREADS = 2
SETTLE_S = 0.02
"""Seconds between calls: OpenMP's threads spin for milliseconds after torch's step, on a core that axon_ps needs."""

CASES: list[tuple[str, dict[str, float], str]] = [
    ("sgd", {"lr": 1e-3}, "fused"),
    ("sgd", {"lr": 1e-3, "momentum": 0.9}, "fused"),
    ("sgd", {"lr": 1e-3, "momentum": 0.9, "nesterov": 1.0}, "fused"),
    ("adam", {"lr": 1e-3}, "fused"),
    ("adamw", {"lr": 1e-3, "weight_decay": 0.01}, "fused"),
    ("adamw", {"lr": 1e-3, "weight_decay": 0.01, "amsgrad": 1.0}, "fused"),
    ("adagrad", {"lr": 1e-3}, "fused"),
    ("rmsprop", {"lr": 1e-3}, "foreach"),
    ("rmsprop", {"lr": 1e-3, "momentum": 0.9, "centered": 1.0}, "foreach"),
    ("lion", {"lr": 1e-4, "weight_decay": 0.1}, "foreach"),
]
TORCH = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


Calls = dict[str, Callable[[], object]]


class Pieces:
    """Runs a function over pieces of [0, numel) on THREADS threads, each taking the next piece until none is left."""

    def __init__(self, numel: int, piece_numel: int) -> None:
        self._numel, self.numel_of_one = numel, piece_numel
        self._pool = ThreadPoolExecutor(THREADS)

    def run(self, one: Callable[[slice], object]) -> None:
        """Run a function; returns when every piece is done."""
        pieces = self._pieces()
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                one(piece)

        for future in [self._pool.submit(work) for _ in range(THREADS)]:
            future.result()

    def _pieces(self) -> Iterator[slice]:
        for start in range(0, self._numel, self.numel_of_one):
            yield slice(start, min(start + self.numel_of_one, self._numel))


def moments(name: str, hyper: dict[str, float], param: Array) -> dict[str, Array]:
    """Return the state arrays of an optimizer, by torch's names. Both sides use the same, so the same pages."""
    optimizer = create(name)
    return {state: np.zeros_like(param) for state in optimizer.state_names([optimizer.validate(hyper)])}


def ours(
    name: str, hyper: dict[str, float], param: Array, grad: Array, memory: dict[str, Array], pieces: Pieces
) -> Calls:
    """Return the calls of axon_ps: the update alone, with the wire copy in the thread's scratch, and with frames."""
    optimizer = create(name)
    values, state = optimizer.validate(hyper), tuple(memory.values())
    own = threading.local()
    frames: dict[int, bytes] = {}
    for dtype in (None, DType.BF16):
        optimizer.warm_up([values], dtype)

    def scratch(numel: int) -> Array:
        if not hasattr(own, "scratch"):
            own.scratch = np.empty(pieces.numel_of_one, np.uint16)
        array: Array = own.scratch
        return array[:numel]

    def update(p: slice, copy: Array | None) -> None:
        optimizer.apply(param[p], grad[p], tuple(s[p] for s in state), copy, DType.BF16, values, 10, 0.5)

    def with_frames(p: slice) -> None:
        copy = scratch(p.stop - p.start)
        update(p, copy)
        for begin in range(0, copy.size, DEFAULT_CHUNK_NUMEL):
            header = common_pb2.Chunk(offset=p.start + begin)
            frames[header.offset] = encode_chunk(header, copy[begin : begin + DEFAULT_CHUNK_NUMEL])

    return {
        "ours": lambda: pieces.run(lambda p: update(p, None)),
        "ours_bf16": lambda: pieces.run(lambda p: update(p, scratch(p.stop - p.start))),
        "ours_frames": lambda: pieces.run(with_frames),
    }


def torchs(
    name: str, hyper: dict[str, float], implementation: str, param: Array, grad: Array, memory: dict[str, Array]
) -> Calls:
    """Return the calls of torch: the update without and with a bf16 copy."""
    tensor = torch.from_numpy(param)
    step = torch_step(name, hyper, implementation, tensor, grad, memory)
    copy = torch.from_numpy(np.zeros(param.size, np.int16)).view(torch.bfloat16)

    def step_and_copy() -> None:
        step()
        copy.copy_(tensor.detach())

    return {"torch": step, "torch_bf16": step_and_copy}


def torch_step(
    name: str,
    hyper: dict[str, float],
    implementation: str,
    tensor: torch.Tensor,
    grad: Array,
    memory: dict[str, Array],
) -> Callable[[], object]:
    """Return torch's update of the same arrays."""
    if name == "lion":
        return torch_lion(tensor, torch.from_numpy(grad), torch.from_numpy(memory["exp_avg"]), **hyper)
    options: dict[str, Any] = {k: bool(v) if k in ("nesterov", "amsgrad", "centered") else v for k, v in hyper.items()}
    tensor.requires_grad_()
    tensor.grad = torch.from_numpy(grad)
    optimizer = getattr(torch.optim, TORCH[name])([tensor], **{implementation: True}, **options)
    optimizer.step()
    state = optimizer.state[tensor]
    theirs = {k for k, v in state.items() if v is not None and v.ndim}
    assert theirs == set(memory), f"torch keeps {theirs}, ours {set(memory)}"
    state |= {k: torch.from_numpy(v) for k, v in memory.items()}
    return lambda: optimizer.step()


def torch_lion(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, lr: float, weight_decay: float
) -> Callable[[], None]:
    """Return a step of Lion with betas 0.9 and 0.99, written as torch's foreach optimizers are."""

    def step() -> None:
        direction = torch._foreach_mul([exp_avg], 0.9)
        torch._foreach_add_(direction, [grad], alpha=0.1)
        torch._foreach_sign_(direction)
        torch._foreach_mul_([param], 1.0 - lr * weight_decay)
        torch._foreach_add_([param], direction, alpha=-lr)
        torch._foreach_lerp_([exp_avg], [grad], 0.01)

    return step


def measure(calls: Calls, repetitions: int) -> dict[str, list[float]]:
    """Return milliseconds per call, in rounds of changing order: a call finds its predecessor's data in the caches.

    The first round, which touches memory for the first time, is left out.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(0)
    for repetition in range(repetitions + 1):
        rng.shuffle(order)
        for name in order:
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            calls[name]()
            if repetition:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: dict[str, list[float]], baseline: str) -> dict[str, float]:
    """Return rounded minima, medians, and ratios to the baseline: the median over rounds of a round's ratio."""
    row = {f"{name}_min_ms": round(min(t), 2) for name, t in times.items()}
    row |= {f"{name}_median_ms": round(statistics.median(t), 2) for name, t in times.items()}
    row |= {
        f"{name}_ratio": round(statistics.median(a / b for a, b in zip(t, times[baseline], strict=True)), 3)
        for name, t in times.items()
        if name.startswith("ours")
    }
    return row


def optimizers(numel: int, pieces: Pieces, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each case of CASES."""
    rng = np.random.default_rng(0)
    param, grad = (rng.standard_normal(numel, dtype=np.float32) for _ in range(2))
    rows = []
    for name, hyper, implementation in CASES:
        memory = moments(name, hyper, param)
        calls = ours(name, hyper, param, grad, memory, pieces)
        calls |= torchs(name, hyper, implementation, param, grad, memory)
        flags = [k for k in ("momentum", "nesterov", "amsgrad", "centered") if hyper.get(k)]
        label = " ".join([name, *flags])
        times = summary(measure(calls, repetitions), "torch")
        rows.append({"optimizer": label, "torch_implementation": implementation, **times})
        del calls, memory
        gc.collect()  # the next optimizer's moments get this memory
    return rows


def accumulation(numel: int, pieces: Pieces, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each way to add a bf16 gradient to an f32 sum and to square it."""
    rng = np.random.default_rng(0)
    acc, chunk = rng.standard_normal(numel, dtype=np.float32), np.zeros(numel, np.uint16)
    cast.encode(acc, chunk, DType.BF16)
    cast.warm_up(DType.BF16)
    their_acc = torch.from_numpy(acc.copy())
    their_chunk = torch.from_numpy(chunk.view(np.int16)).view(torch.bfloat16)
    widened = torch.empty_like(their_acc)

    def torch_add() -> None:
        widened.copy_(their_chunk)  # several times faster than add_ with mixed types
        their_acc.add_(widened)

    def accumulate_last(p: slice) -> None:
        digests = np.zeros((2, -(-acc[p].size // BLOCK_NUMEL)), np.uint64)
        cast.accumulate_last(acc[p], chunk[p], DType.BF16, False, digests, BLOCK_NUMEL)

    calls: Calls = {
        "accumulate": lambda: pieces.run(lambda p: cast.accumulate(acc[p], chunk[p], DType.BF16, False)),
        "accumulate_last": lambda: pieces.run(accumulate_last),
        "sum_of_squares": lambda: pieces.run(lambda p: cast.sum_of_squares(acc[p])),
        "encode": lambda: pieces.run(lambda p: cast.encode(acc[p], chunk[p], DType.BF16)),
        "torch copy_ and add_": torch_add,
        "torch linalg.vector_norm": lambda: torch.linalg.vector_norm(their_acc),
        "torch copy_ to bf16": lambda: their_chunk.copy_(their_acc),
    }
    times = measure(calls, repetitions)
    return [
        {"operation": name, "median_ms": round(statistics.median(t), 2), "min_ms": round(min(t), 2)}
        for name, t in times.items()
    ]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--piece-numel", type=int, default=RUN_NUMEL, help="elements per piece")
    parser.add_argument("--quick", action="store_true", help="4M parameters, few repetitions, writes no file")
    options = parser.parse_args()
    quick, piece_numel = options.quick, options.piece_numel
    numel, repetitions = (4 * 2**20, 3) if quick else (64 * 2**20, 15)
    torch.set_num_threads(THREADS)
    retain_message_memory()

    pieces = Pieces(numel, piece_numel)
    steps = optimizers(numel, pieces, repetitions)
    columns = {
        "ours ms": "ours_median_ms",
        "+ bf16 ms": "ours_bf16_median_ms",
        "+ frames ms": "ours_frames_median_ms",
        "torch ms": "torch_median_ms",
        "torch + bf16 ms": "torch_bf16_median_ms",
        "ours/torch": "ours_ratio",
        "ours + bf16/torch": "ours_bf16_ratio",
        "ours + frames/torch": "ours_frames_ratio",
    }
    report.table(
        f"Optimizer step, {numel:,} parameters, {THREADS} threads, pieces of {piece_numel:,}, medians of {repetitions}",
        ["optimizer", "torch is", *columns],
        [[row["optimizer"], row["torch_implementation"], *(row[c] for c in columns.values())] for row in steps],
    )
    sums = accumulation(numel, pieces, repetitions)
    report.table(
        f"Gradients, {numel:,} elements, {THREADS} threads",
        ["operation", "median ms", "min ms"],
        [[row["operation"], row["median_ms"], row["min_ms"]] for row in sums],
    )
    if not quick:
        sizes = {"numel": numel, "threads": THREADS, "piece_numel": piece_numel, "repetitions": repetitions}
        report.write("kernels", steps, **sizes, gradients=sums)


if __name__ == "__main__":
    main()
