"""Step time while a checkpoint is written, against step time otherwise, alternating in one run.

A 17M-parameter residual MLP is trained under FULL_SHARD on this machine, with Adam's state and one shard server, whose
memory the workers map. 12 bytes a parameter are written, to a local disk. Each round makes some steps, then has a
checkpoint written, and makes steps until it is complete. In the setting `cpu`, workers compute on the same cores that
write; in `device`, they wait for an emulated accelerator.

Reported are the median step without and with a checkpoint being written, their ratio, the ratio of the longest step,
and the cost of checkpoints to a job that writes one every ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from axon_ps_lab import report
from cluster import Loopback, axon_cluster

INTERVAL_S = 600.0
RUN_TIMEOUT_S = 900.0


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one worker; returns the figures on rank 0."""
    import torch
    import torch.nn.functional as F

    import axon_ps
    from axon_ps.parallel import AdamW, FullyShardedDataParallel
    from step_worker import Block, ResidualMLP, go_first

    torch.set_num_threads(1)
    quiet_s: list[float] = []
    busy_s: list[float] = []
    written_s: list[float] = []
    with axon_ps.World.init() as world:
        model = FullyShardedDataParallel(
            ResidualMLP(options.width, options.blocks, options.device_s), world.default_group, unit_types={Block}
        )
        optimizer = AdamW(model.parameters(), lr=1e-4)
        if options.device_s:
            go_first()

        def step() -> float:
            began_s = time.perf_counter()
            x = torch.randn(options.tokens, options.width)
            F.cross_entropy(model(x), torch.zeros(options.tokens, dtype=torch.long)).backward()
            if not optimizer.step().committed:
                raise RuntimeError("a step was not committed: the figures would not be of whole steps")
            optimizer.zero_grad()
            return time.perf_counter() - began_s

        for _ in range(3):
            step()
        for number in range(options.rounds):
            quiet_s += [step() for _ in range(options.steps)]
            began_s = time.perf_counter()
            saving = None
            if world.rank == 0:
                saving = world.save_checkpoint(f"{options.directory}/{number}", async_op=True, timeout_s=300.0)
            while True:  # the same number on every rank: rank 0 ends the loop for all
                busy_s.append(step())
                over = saving is not None and saving.is_completed()
                if not any(world.gather_json(over)):
                    continue
                if saving is not None:
                    size = saving.wait(300.0).bytes
                    written_s.append(time.perf_counter() - began_s)
                break
    if world.rank:
        return {}
    return {"quiet_s": quiet_s, "busy_s": busy_s, "written_s": written_s, "bytes": size}


def row(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the table."""
    quiet_s, busy_s = figures["quiet_s"], figures["busy_s"]
    median_s = statistics.median(quiet_s)
    extra_s = (sum(busy_s) - len(busy_s) * median_s) / len(figures["written_s"])
    return {
        "workers": name,
        "step_s": round(median_s, 4),
        "while_written_s": round(statistics.median(busy_s), 4),
        "ratio": round(statistics.median(busy_s) / median_s, 3),
        "longest_ratio": round(max(busy_s) / median_s, 2),
        "longest_ratio_without": round(max(quiet_s) / median_s, 2),
        "written_in_s": round(statistics.median(figures["written_s"]), 2),
        "mib": round(figures["bytes"] / 2**20),
        "steps_while_written": len(busy_s),
        "extra_s_each": round(extra_s, 3),
        "percent_of_ten_minutes": round(100 * extra_s / INTERVAL_S, 3),
    }


def measure(options: argparse.Namespace, device_s: float) -> dict[str, Any]:
    """Run all rounds of one setting."""
    with (
        tempfile.TemporaryDirectory(prefix="axon-ps-bench-", dir=options.directory) as directory,
        Loopback(["here"]) as place,
        axon_cluster(place, ["here"], workers=options.workers) as (_, coordinator),
    ):
        command = [sys.executable, __file__, "--work", "--directory", directory, "--device-s", str(device_s)]
        for name in ("width", "blocks", "tokens", "rounds", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        workers = []
        for rank in range(options.workers):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.workers)}
            environment = os.environ | ranks | {"AXON_PS_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
            workers.append(place.popen("here", command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [worker.communicate(timeout=RUN_TIMEOUT_S)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError("a worker failed")
    figures: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device-s", type=float, default=0.25, help="an emulated accelerator's seconds a step")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to write to")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round without a checkpoint")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options)))
        return 0
    if options.quick:
        options.rounds = 2
    rows = [row("cpu", measure(options, 0.0)), row("device", measure(options, options.device_s))]
    report.table("steps while a checkpoint is written", list(rows[0]), [list(r.values()) for r in rows])
    if not options.quick:
        settings = {name: getattr(options, name) for name in ("workers", "width", "blocks", "tokens", "rounds")}
        report.write("checkpoint_steps", rows, **settings, device_s=options.device_s, interval_s=INTERVAL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
