"""A rolling update of the shard servers while a job trains, from the manifests of deploy/kubernetes.

    make lab NAME=rolling-update        # needs docker, and the images of `docker-compose build`

There is no cluster: the pods are containers, with the manifests' images, arguments, variables, DNS names, probes,
signals and grace periods. `pods.py` does the work of a StatefulSet's controller. The campaign checks that no step is
lost, and that none is aborted while servers come and go. It prints a table, and writes
benchmarks/results/rolling_update.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from axon_ps_lab import report
from axon_ps_lab.containers.pods import Pods, rendered
from axon_ps_lab.containers.watch import SMALL, Watch

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "the-random-secret-of-a-test"
SHARD, COORDINATOR = "axon-ps-shard", "axon-ps-coordinator"
SERVERS, WORKERS = 3, 2


def main() -> None:
    """Render, run, report."""
    manifests = rendered(str(ROOT / "deploy/kubernetes/jobset"))
    for jobset in (m for m in manifests if m["kind"] == "JobSet"):
        container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        container["args"] = [*(a for a in container["args"] if a.startswith(("--nnodes", "--connect"))), *SMALL]
    rows: list[dict[str, object]] = []
    secrets, config = {"axon-ps": {"token": TOKEN}}, {"SHARDS": str(SERVERS), "WORKERS": str(WORKERS)}
    with Pods(manifests, secrets, config, "axon-ps-rolling") as pods:

        def event(what: str, act: Callable[[], object], workers: int, servers: int) -> None:
            began_s = time.monotonic()
            watch.mark()
            act()
            watch.settled(workers, servers)
            took_s, seen = time.monotonic() - began_s, watch.seen
            assert not watch.lost, f"{watch.lost} committed steps are lost after: {what}"
            rows.append({"event": what, "took_s": took_s, "committed": seen.committed, "aborted": seen.aborted,
                         "pause_s": seen.pause_s, "lost": watch.lost})  # fmt: skip
            print(rows[-1], flush=True)

        pods.scale(COORDINATOR, 1)
        pods.scale(SHARD, SERVERS)
        pods.job(WORKERS)
        with Watch(lambda: pods.address(f"{COORDINATOR}-0", 7077), TOKEN, "default") as watch:
            try:
                watch.settled(WORKERS, SERVERS)
                event(f"rolling update of {SERVERS} servers", lambda: list(pods.roll(SHARD, REVISION="2")), 2, SERVERS)
                event("servers from 3 to 4", lambda: pods.scale(SHARD, 4), 2, 4)
                event("servers from 4 to 2", lambda: pods.scale(SHARD, 2), 2, 2)
                event("rolling update of 2 servers", lambda: list(pods.roll(SHARD, REVISION="3")), 2, 2)
                assert not sum(int(str(row["aborted"])) for row in rows), "servers that come and go abort no step"
                event("workers from 2 to 3", lambda: pods.job(3), 3, 2)
                event("workers from 3 to 2", lambda: pods.job(2), 2, 2)
            except BaseException:
                for pod in (f"{COORDINATOR}-0", *pods.pods_of(SHARD), *pods.pods_of("axon-ps-worker-0")):
                    print(f"--- {pod}\n{pods.logs(pod)}", file=sys.stderr)
                raise
    columns = list(rows[0])
    report.table("Rolling update", columns, [[row[c] for c in columns] for row in rows])
    print(f"wrote {report.write('rolling_update', rows, servers=SERVERS, workers=WORKERS)}")


if __name__ == "__main__":
    main()
