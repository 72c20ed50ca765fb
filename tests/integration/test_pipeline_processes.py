"""`Pipeline` over real processes, through shared memory and through gRPC, and with the other two parallelisms."""

from __future__ import annotations

from pathlib import Path

import pipeline_worker
import tables
from axon_ps.parallel.pipeline import PipelineMemoryStats
from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S
from tables import Record

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_processes_train_like_one(record_property: Record, tmp_path: Path) -> None:
    """Everything that needs processes, in one set of them: starting them is what takes time."""
    with LocalCluster(shards=1, world_size=8) as cluster:
        arguments = (str(EXAMPLES), str(tmp_path))
        results = [r.value for r in cluster.run_workers(pipeline_worker.run, args=arguments, timeout_s=WHOLE_S)]
    one_f_one_b = [PipelineMemoryStats.one_f_one_b_peak_activations(4, 8, rank) for rank in range(4)]
    interleaved = [PipelineMemoryStats.interleaved_peak_activations(4, 2, 8, rank) for rank in range(4)]
    expected = {
        "shm gpipe": ([PipelineMemoryStats.gpipe_peak_activations(4, 8)] * 4, 64),
        "shm 1f1b": (one_f_one_b, 64),
        "shm interleaved-1f1b": (interleaved, 128),
        "grpc 1f1b": (one_f_one_b, 64),
    }
    rows = [("Pipeline", name, 4, results[0][name][0], 1e-5) for name in expected]
    rows.append(("Pipeline, TensorParallel, DDP", "mesh 2 x 2 x 2", 8, results[0]["2 x 2 x 2"], 1e-5))
    for wrapper, setting, workers, difference, allowed in rows:
        tables.add(
            record_property,
            tables.PARITY,
            wrapper=wrapper,
            setting=setting,
            precision="f32",
            workers=workers,
            off_by=f"{difference:.1e}",
            allowed=f"{allowed:g}",
        )
    for result in results:
        assert result["2 x 2 x 2"] < 1e-5
        assert result["losses"] == results[0]["losses"]
    for rank, result in enumerate(results[:4]):
        for name, (peaks, actions) in expected.items():
            difference, *rest = result[name]
            assert difference <= 1e-5, name
            assert rest == [peaks, actions], name
        for name in ("error shm", "error grpc"):
            said = "ValueError: out of ideas" if rank == 2 else "Broken: stage 2 on rank 2 of the pipeline failed in"
            assert result[name].startswith(said), result[name]
            assert "stage 2 on rank 2 of the pipeline failed in forward of microbatch 0" in result[name]
        assert result["after"] == 4.0
