"""`make lab NAME=chaos`: the default campaign, 2,000 faults of many kinds over all roles of one job, and their cost.

    python benchmarks/chaos.py [--faults 2000] [--seed 20] [--campaign examples/chaos.toml]

The samples of every committed step are compared with those it should have had, and the weights bit by bit with those of
the same job without faults. The memory of the processes that live long has to be flat. The page build/chaos/chaos.html
has every fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from axon_ps_lab import report
from axon_ps_lab.chaos import load
from axon_ps_lab.chaos.page import page
from axon_ps_lab.chaos.report import report as report_of
from axon_ps_lab.chaos.run import run_embedded

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "chaos"
COLUMNS = (
    "kind", "role", "faults", "detected", "detection_median_s", "next_commit_median_s", "next_commit_worst_s",
    "complete_median_s", "steps_lost", "aborted",
)  # fmt: skip
ONLY_IN_THE_PAGE = ("timeline", "commits_per_s", "memory_mib", "by_kind")


def main() -> int:
    """Run the campaign; returns 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaign", type=Path, default=ROOT / "examples" / "chaos.toml")
    parser.add_argument("--faults", type=int)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    campaign = load(options.campaign)
    campaign = dataclasses.replace(campaign, seed=campaign.seed if options.seed is None else options.seed)
    campaign = dataclasses.replace(campaign, faults=options.faults or campaign.faults)
    result = run_embedded(campaign, lambda line: print(line, flush=True))
    content = report_of(result)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "chaos.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    (BUILD / "chaos.html").write_text(page(content), encoding="utf-8")
    report.table("Faults", COLUMNS, [[row[c] for c in COLUMNS] for row in content["by_kind"]])
    facts = {name: value for name, value in content.items() if name not in ONLY_IN_THE_PAGE}
    print(json.dumps(facts, indent=2, ensure_ascii=False))
    report.write("chaos", content["by_kind"], **facts, load_average=round(os.getloadavg()[0], 2))
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
