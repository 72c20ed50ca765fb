"""Pipeline schedules: bubble and peak activations, 4 ranks x 8 microbatches, against the formulas.

    python benchmarks/pipeline.py [--steps N] [--width W] [--gantt]

Four processes, each with equal stages of matrix products, train through `axon_ps.parallel.pipeline`. A machine with
fewer cores than ranks cannot show the time of a pipeline, so two results are reported:

- "recorded": wall-clock time of the step and its bubble on this machine as it is, cores shared or not;
- "replayed": the recorded order of actions, each as long as its CPU time (median of the steps), as if each rank
  had a core. Its bubble is compared with (p - 1) / (k m + p - 1), which takes messages to be free. "messages" is the
  same with messages as long as a message between two ranks of this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from axon_ps import ProcessGroup, World
from axon_ps.parallel.pipeline import Pipeline, PipelineMemoryStats, PipelineSchedule, Timeline, ideal_bubble, simulate
from axon_ps.testing import LocalCluster
from axon_ps_lab import report

RANKS, MICROBATCHES, ROWS = 4, 8, 64
LAYERS = 16  # of all stages
COLUMNS = ["schedule", "stages", "step_ms", "recorded", "replayed", "formula", "off", "messages", "peaks", "formulas"]


def message_s(group: ProcessGroup, sample: Tensor, repeats: int = 20) -> float:
    """Return the seconds of a message between rank 0 and rank 1, one way."""
    times = []
    for _ in range(repeats):
        group.barrier()
        begin = time.perf_counter()
        if group.rank == 0:
            group.send(sample, 1)
            group.recv(sample, 1)
        elif group.rank == 1:
            group.recv(sample, 0)
            group.send(sample, 0)
        times.append((time.perf_counter() - begin) / 2)
    return float(group.broadcast(torch.tensor([statistics.median(times)], dtype=torch.float64))[0])


def replay(timelines: list[Timeline], transfer_s: float) -> Timeline:
    """Replay one step with the median CPU time of each action."""
    by_action: dict[Any, list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            by_action.setdefault(span.action, []).append(span.cpu_s)
    cost_s = {action: statistics.median(times) for action, times in by_action.items()}
    tables = [[span.action for span in timelines[-1].of(rank)] for rank in range(RANKS)]
    return simulate(tables, cost_s.__getitem__, transfer_s)


def worker(steps: int, width: int) -> list[dict[str, Any]]:
    """Run every schedule; returns the rows of rank 0."""
    torch.set_num_threads(1)
    rows = []
    with World.init() as world:
        group = world.default_group
        x, y = torch.randn(MICROBATCHES * ROWS, width), torch.randn(MICROBATCHES * ROWS, width)
        transfer_s = message_s(group, x[:ROWS].clone())
        for schedule in PipelineSchedule:
            per_rank = 2 if schedule.loops else 1
            torch.manual_seed(0)
            modules = [nn.Linear(width, width) for _ in range(LAYERS)]
            options: dict[str, Any] = {"num_microbatches": MICROBATCHES, "schedule": schedule}
            with Pipeline.from_modules(
                modules, RANKS * per_rank, group, loss_fn=functional.mse_loss, **options
            ) as pipeline:
                timelines, times = [], []
                for step in range(steps + 1):
                    begin = time.perf_counter()
                    pipeline.step(x, y)
                    if step:  # the first step warms up
                        times.append(time.perf_counter() - begin)
                        timelines.append(pipeline.timeline())
                peak = pipeline.memory_stats().peak_activations
            peaks = [int(p) for p in group.all_gather(torch.tensor([peak]))]
            replayed, messages = replay(timelines, 0.0), replay(timelines, transfer_s)
            rows.append(
                {
                    "schedule": schedule.value,
                    "stages": RANKS * per_rank,
                    "step_ms": statistics.median(times) * 1e3,
                    "recorded": statistics.median(t.bubble_fraction for t in timelines),
                    "replayed": replayed.bubble_fraction,
                    "messages": messages.bubble_fraction,
                    "replayed_ms": replayed.makespan_s * 1e3,
                    "transfer_ms": transfer_s * 1e3,
                    "peaks": peaks,
                    "gantt": replayed.gantt(120),
                    "gantt_recorded": timelines[-1].gantt(120),
                }
            )
    return rows


def formulas(schedule: PipelineSchedule) -> tuple[float | None, list[int] | None]:
    """Return the bubble, and the peaks by rank; None = the paper gives none for undivided actions."""
    if schedule is PipelineSchedule.ZERO_BUBBLE:
        return None, None
    if schedule is PipelineSchedule.INTERLEAVED_ONE_F_ONE_B:
        peaks = [PipelineMemoryStats.interleaved_peak_activations(RANKS, 2, MICROBATCHES, r) for r in range(RANKS)]
        return ideal_bubble(RANKS, MICROBATCHES, 2), peaks
    if schedule is PipelineSchedule.GPIPE:
        peaks = [PipelineMemoryStats.gpipe_peak_activations(RANKS, MICROBATCHES)] * RANKS
    else:
        peaks = [PipelineMemoryStats.one_f_one_b_peak_activations(RANKS, MICROBATCHES, r) for r in range(RANKS)]
    return ideal_bubble(RANKS, MICROBATCHES), peaks


def main() -> None:
    """Run, print, write results/pipeline.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--width", type=int, default=1024, help="of the square matrices")
    parser.add_argument("--gantt", action="store_true", help="print the replayed timelines")
    args = parser.parse_args()
    with LocalCluster(shards=1, world_size=RANKS) as cluster:
        rows = cluster.run_workers(worker, args=(args.steps, args.width), timeout_s=300.0)[0].value
    lines = []
    for row in rows:
        row["formula"], row["formulas"] = formulas(PipelineSchedule(row["schedule"]))
        row["off"] = row["replayed"] / row["formula"] - 1.0 if row["formula"] else None
        lines.append([str(row[c]) if isinstance(row[c], list) else row[c] for c in COLUMNS])
        pictures = row.pop("gantt"), row.pop("gantt_recorded")
        if args.gantt:
            print(f"\n{row['schedule']}, a core for each rank:\n{pictures[0]}\nas recorded:\n{pictures[1]}")
    report.table(f"{RANKS} ranks x {MICROBATCHES} microbatches of f32[{ROWS}, {args.width}]", COLUMNS, lines)
    print(f"written: {report.write('pipeline', rows, steps=args.steps, width=args.width, rows_per_microbatch=ROWS)}")


if __name__ == "__main__":
    main()
