"""The measurements of `gpu.py` on one GPU, one part in each process: staging, gather, kernels, step.

Times are medians over rounds, of work that is done: the program has waited for the device. Calls that are compared
alternate within a round, where they run in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axon_ps.collectives import arrays, cuda
from axon_ps.collectives.staging import Staging
from axon_ps.parallel.comm_hooks import device_codecs
from axon_ps.parallel.fsdp.memory import host_empty
from axon_ps.types import INT8_BLOCK_NUMEL
from axon_ps_lab import report

Call = Callable[[], object]
MIB = 1 << 20


def device() -> torch.device:
    """Return the GPU; with a stand-in, the device of its memory."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait() -> None:
    """Wait until the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def about() -> dict[str, Any]:
    """Return the facts that a reader needs to know of the GPU."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "cupy": cuda.load().__version__,
    }


def median_s(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; calls alternate, and one round is for warming up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            wait()
            begin_s = time.perf_counter()
            call()
            wait()
            if number:
                times[name].append(time.perf_counter() - begin_s)
    return {name: statistics.median(values) for name, values in times.items()}


def publish(name: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], **extra: Any) -> None:
    """Print the table and write benchmarks/results/gpu/<name>.json."""
    report.table(name, columns, [[row.get(c) for c in columns] for row in rows])
    print(report.write(f"gpu/{name}", rows, **about(), **extra))


# ---------------------------------------------------------------------- staging


def staging(options: argparse.Namespace) -> None:
    """Measure axon_ps's copies from and to page-locked memory against torch's."""
    crossing, rows = Staging(), []
    for size_mib in (1, 16) if options.quick else (1, 4, 16, 64, 256):
        numel = size_mib * MIB // 4
        tensor = torch.ones(numel, device=device())
        theirs = host_empty(numel, torch.float32, pinned=True)
        flat = arrays.flatten(tensor).array
        host = crossing.allocate(flat)
        times = median_s(
            {
                "download": lambda a=flat, h=host: crossing.download(a, h),  # type: ignore[misc]
                "torch download": lambda t=tensor, h=theirs: h.copy_(t, non_blocking=True),  # type: ignore[misc]
                "upload": lambda a=flat, h=host: crossing.upload(h, a),  # type: ignore[misc]
                "torch upload": lambda t=tensor, h=theirs: t.copy_(h, non_blocking=True),  # type: ignore[misc]
            },
            options.rounds,
        )
        crossing.free(host)
        for way in ("download", "upload"):
            rows.append(
                {
                    "what": way,
                    "mib": size_mib,
                    "gb_s": numel * 4 / times[way] / 1e9,
                    "limit_gb_s": numel * 4 / times[f"torch {way}"] / 1e9,
                    "of_limit": times[f"torch {way}"] / times[way],
                }
            )
    publish("staging", ["what", "mib", "gb_s", "limit_gb_s", "of_limit"], rows)


# ---------------------------------------------------------------------- kernels


def kernels(options: argparse.Namespace) -> None:
    """Measure each kernel against a pass over the same bytes in device memory, and against any operation of torch."""
    numel = (1 if options.quick else 64) * MIB
    values = torch.randn(numel, device=device())
    residual = torch.zeros_like(values)
    half, copy = torch.empty(numel, dtype=torch.bfloat16, device=device()), torch.empty_like(values)
    blocks = torch.empty(numel // INT8_BLOCK_NUMEL, device_codecs.BLOCK_BYTES, dtype=torch.uint8, device=device())
    kept = numel // 100
    pairs = torch.empty(8 * kept, dtype=torch.uint8, device=device())
    calls: dict[str, tuple[Call, int]] = {
        "copy (the memory's limit)": (lambda: copy.copy_(values), 8 * numel),
        "cast to bf16": (lambda: half.copy_(values), 6 * numel),
        "int8 blocks, encode": (lambda: device_codecs.encode_blocks(values, blocks, residual), 13 * numel),
        "int8 blocks, decode": (lambda: device_codecs.decode_blocks(blocks, copy), 5 * numel),
        "torch cast to fp8": (lambda: values.to(torch.float8_e4m3fn), 5 * numel),
        "top-k 1 %": (lambda: device_codecs.top_k(values, pairs, residual), 12 * numel),
        "torch topk 1 %": (lambda: torch.topk(values.abs(), kept), 4 * numel),
    }
    times = median_s({name: call for name, (call, _) in calls.items()}, options.rounds)
    limit = 8 * numel / times["copy (the memory's limit)"] / 1e9
    rows = [
        {"what": name, "ms": s * 1e3, "gb_s": calls[name][1] / s / 1e9, "of_limit": calls[name][1] / s / 1e9 / limit}
        for name, s in times.items()
    ]
    publish("kernels", ["what", "ms", "gb_s", "of_limit"], rows, numel=numel)


# ---------------------------------------------------------------------- jobs


class Block(nn.Module):
    """A residual MLP block of 2 x width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] → [n, width]."""
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def build(options: argparse.Namespace) -> nn.Sequential:
    """Make the model, the same on every side: 8 blocks of 2048 are 67 million parameters."""
    torch.manual_seed(0)
    width, blocks = (256, 2) if options.quick else (2048, 8)
    return nn.Sequential(*(Block(width) for _ in range(blocks))).to(device())


def wrapped(options: argparse.Namespace, world: Any) -> Any:
    """Wrap the model in one of axon_ps's strategies, with bf16 for computing and sending."""
    from axon_ps import parallel

    return parallel.FSDP(
        build(options),
        world.default_group,
        sharding_strategy=parallel.ShardingStrategy[options.side.upper()],
        mixed_precision=parallel.MixedPrecision(param_dtype=torch.bfloat16),
        unit_types={Block},
    )


def gather(options: argparse.Namespace) -> None:
    """Gather all units into device memory repeatedly; they are freed in between."""
    import axon_ps

    with axon_ps.World.init() as world:
        model = wrapped(options, world)
        bytes_moved = 2 * model.spec.layout.numel

        def summon() -> None:
            with model.summon_full_params():
                wait()

        theirs = host_empty(bytes_moved // 2, torch.bfloat16, pinned=True)
        tensor = torch.empty(bytes_moved // 2, dtype=torch.bfloat16, device=device())
        times = median_s({"ours": summon, "copy": lambda: tensor.copy_(theirs, non_blocking=True)}, options.rounds)
    row = {"side": options.side, "mib": bytes_moved / MIB, "gb_s": bytes_moved / times["ours"] / 1e9}
    row |= {"limit_gb_s": bytes_moved / times["copy"] / 1e9, "of_limit": times["copy"] / times["ours"]}
    (options.into / f"{options.side}.json").write_text(json.dumps(row))


def step(options: argparse.Namespace) -> None:
    """Measure whole steps of one side, each with a loss that is read."""
    if options.side == "fsdp2":
        one, close = fsdp2(options)
    else:
        one, close = ours(options)
    x = torch.randn(options.tokens, 256 if options.quick else 2048, device=device(), dtype=torch.bfloat16)
    times_s, losses = [], []
    for number in range(-3, options.rounds):
        begin_s = time.perf_counter()
        losses.append(float(one(x)))
        wait()
        if number >= 0:
            times_s.append(time.perf_counter() - begin_s)
    memory = torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0.0
    close()
    row = {"side": options.side, "median_ms": statistics.median(times_s) * 1e3, "fastest_ms": min(times_s) * 1e3}
    row |= {"gpu_peak_mib": memory, "last_loss": round(losses[-1], 4)}
    (options.into / f"{options.side}.json").write_text(json.dumps(row))


def ours(options: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Call]:
    """Make the side of axon_ps."""
    import axon_ps
    from axon_ps import parallel

    world = axon_ps.World.init()
    model = wrapped(options, world)
    optimizer = parallel.AdamW(model.parameters(), lr=1e-4)

    def one(x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if not optimizer.step().committed:
            raise RuntimeError("a step was not committed: the figures would not be of whole steps")
        optimizer.zero_grad()
        return loss.detach()

    return one, world.close


def fsdp2(options: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], Call]:
    """Make the side of PyTorch's fully_shard over NCCL."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(  # type: ignore[attr-defined]
        str(Path(tempfile.mkdtemp()) / "store"), 1
    )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(kind, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = build(options)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def one(x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return one, dist.destroy_process_group


def summed_up(options: argparse.Namespace) -> None:
    """Print the table of the results that the sides of a part have written."""
    rows = [json.loads(path.read_text()) for path in sorted(options.into.glob("*.json"))]
    if options.part == "step":
        theirs = next((row["median_ms"] for row in rows if row["side"] == "fsdp2"), None)
        for row in rows:
            row["to_fsdp2"] = None if theirs is None else row["median_ms"] / theirs
    publish(options.part, list(rows[0]), rows, tokens=options.tokens)


def main() -> None:
    """Measure one part, or one side of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("staging", "kernels", "gather", "step"))
    parser.add_argument("--quick", action="store_true", help="smaller, and fewer rounds")
    parser.add_argument("--side", default="", help="gather, step: a strategy, or fsdp2")
    parser.add_argument("--into", type=Path, help="gather, step: where sides leave their rows")
    parser.add_argument("--report", action="store_true", help="gather, step: the table of the rows")
    options = parser.parse_args()
    options.rounds, options.tokens = (3, 64) if options.quick else (20, 4096)
    if options.report:
        summed_up(options)
    else:
        {"staging": staging, "kernels": kernels, "gather": gather, "step": step}[options.part](options)


if __name__ == "__main__":
    main()
