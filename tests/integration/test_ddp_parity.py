"""DDP over our groups, in processes, trains what torch's DDP trains over gloo; with hooks, to a stated tolerance."""

from __future__ import annotations

import json
from pathlib import Path

import forked_workers
import tables
from axon_ps.testing import LocalCluster
from deadlines import WHOLE_S
from tables import Record

HERE = Path(__file__).parent
RANKS = 4
SCENARIOS = 21


def test_every_way_to_average_gives_what_torch_gives_on_one_to_four_ranks(
    tmp_path: Path, record_property: Record
) -> None:
    with LocalCluster(shards=1, world_size=RANKS) as cluster:
        environments = [cluster.env(rank) for rank in range(RANKS)]
        plan = {"path": str(HERE), "runs": [["ddp_scenarios", [str(RANKS), str(tmp_path)], environments]]}
        (tmp_path / "runs.json").write_text(json.dumps(plan))
        cluster.run_workers(forked_workers.in_a_worker, n=1, args=(str(tmp_path / "runs.json"),), timeout_s=WHOLE_S)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == (RANKS - rank) * SCENARIOS
        assert [row for row in found if not row[2] <= row[3]] == []
        if rank == 0:
            for name, ranks, difference, allowed in found:
                tables.add(
                    record_property,
                    "Distance of DDP from torch's over gloo, largest |a - b| of a parameter over its largest value",
                    wrapper=f"DDP, {name}",
                    workers=ranks,
                    off_by=f"{difference:.1e}",
                    allowed=f"{allowed:g}",
                )
