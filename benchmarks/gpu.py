"""`make gpu`: all checks and benchmarks that need a GPU, on a machine where nothing can be installed.

    python benchmarks/gpu.py [--quick] [tests] [job] [staging] [gather] [kernels] [step]

- tests: tests/gpu, under pytest.
- job: the main job, examples/train_gpt.py, on CUDA with one rank, under FULL_SHARD and under HYBRID_SHARD.
- staging: the rate of copies between device memory and page-locked memory, against a plain copy of torch's, which is
  the link's limit.
- gather: the rate at which units come from a shard server of this host into device memory, by strategy, against that.
- kernels: int8 blocks, top-k and casts of gradients on the GPU, against a copy in device memory (the memory's limit)
  and against torch's operation where there is one.
- step: a whole step against FSDP2 over NCCL, with one rank on both sides.

Results go to benchmarks/results/gpu/, one file each. Coordinator and shard servers run in this process, the measured
work in another. Without a GPU the program says so in one line, does nothing, and exits with code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "job", "staging", "gather", "kernels", "step")
SERVERS = 2


def missing() -> str:
    """Return the reason why no GPU can be used here; empty if one can be."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    from axon_ps.collectives import cuda
    from axon_ps.errors import AxonError

    try:
        cuda.load()
    except AxonError as error:
        return str(error)
    return ""


def environment() -> dict[str, str]:
    """Return this process's environment without `AXON_PS_*`, and with this checkout's package and modules."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")}
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples"), *filter(None, [ours.get("PYTHONPATH")])]
    return ours | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run(command: Sequence[str], extra: dict[str, str] | None = None) -> bool:
    """Run a program of this Python; returns True if it ended well."""
    print("$", *command, flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment() | (extra or {})).returncode == 0


def with_services(command: Sequence[str]) -> bool:
    """Run a worker on a coordinator and shard servers of its own; returns True if it ended well."""
    sys.path.insert(0, str(ROOT / "tests" / "integration"))
    import job_services  # type: ignore[import-not-found]  # of the tests

    with job_services.JobServices([(1, SERVERS)], threads=4) as services:
        world = {
            "AXON_PS_COORDINATOR": services.addresses[0],
            "AXON_PS_TOKEN": job_services.TOKEN,
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
        }
        return run(command, world)


def tests(_: argparse.Namespace) -> bool:
    """Run tests/gpu. Warnings of third-party libraries do not count."""
    return run(["-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/gpu"])


def job(options: argparse.Namespace) -> bool:
    """Run the main job, under both strategies."""
    steps = "20" if options.quick else "200"
    good = True
    for strategy in ("full_shard", "hybrid_shard"):
        with tempfile.TemporaryDirectory() as directory:
            arguments = ["--device", "cuda", "--steps", steps, "--strategy", strategy, "--out", directory]
            good = with_services(["examples/train_gpt.py", *arguments]) and good
    return good


def measured(part: str) -> Callable[[argparse.Namespace], bool]:
    """Return a function that runs a part of gpu_device.py that needs no services."""
    return lambda options: run(["benchmarks/gpu_device.py", part, *(["--quick"] if options.quick else [])])


def gather(options: argparse.Namespace) -> bool:
    """Run the strategies one after the other, each with services of its own, then print their table."""
    return _sides("gather", ("full_shard", "hybrid_shard"), options)


def step(options: argparse.Namespace) -> bool:
    """Run axon_ps's strategies and FSDP2, one after the other, then print their table."""
    return _sides("step", ("fsdp2", "full_shard", "shard_grad_op", "hybrid_shard"), options)


def _sides(part: str, sides: Sequence[str], options: argparse.Namespace) -> bool:
    quick = ["--quick"] if options.quick else []
    good = True
    with tempfile.TemporaryDirectory() as directory:
        for side in sides:
            start = run if side == "fsdp2" else with_services
            good = start(["benchmarks/gpu_device.py", part, "--side", side, "--into", directory, *quick]) and good
        return run(["benchmarks/gpu_device.py", part, "--report", "--into", directory, *quick]) and good


DO: dict[str, Callable[[argparse.Namespace], bool]] = {
    "tests": tests,
    "job": job,
    "staging": measured("staging"),
    "gather": gather,
    "kernels": measured("kernels"),
    "step": step,
}


def main() -> int:
    """Run the parts asked for; returns 1 if one failed, or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; none: all")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    sys.path.insert(0, str(ROOT))
    if why := missing():
        print(f"make gpu: there is no GPU to use on this machine, so nothing was run ({why})", file=sys.stderr)
        return 1
    failed = [part for part in options.parts or PARTS if not DO[part](options)]
    if failed:
        print(f"make gpu: failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
