"""A real Prometheus scrapes a running job: what its query API answers equals `.statistics()`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from axon_ps.host.ports import free_ports
from axon_ps.observe.metrics.table import REPEATED, TABLE, described

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
TOKEN = "of-this-test"
WORKERS, SHARDS = 2, 2


def program(name: str) -> str:
    """The path of a program of Prometheus's."""
    found = shutil.which(name)
    assert found, f"{name} is missing; `apt-get install prometheus` has it"
    return found


@contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def until(what: Callable[[], Any], logs: Path, limit_s: float = 120.0) -> Any:
    """What is found, once it is."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not (found := what()):
        if time.monotonic() > deadline:
            pytest.fail("\n".join(f"--- {log}\n{log.read_text()[-3000:]}" for log in logs.glob("*.log")))
        pause.wait(0.2)
    return found


def query(port: int, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
            return result
    except OSError:
        return []


def expected(numbers: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """By metric, role and rank, what the processes themselves counted."""
    counted = [("worker", "worker", rank, n["worker"]) for rank, n in enumerate(numbers)]
    counted += [("fsdp", "worker", rank, n["fsdp"]) for rank, n in enumerate(numbers)]
    counted += [("shard", "shard", rank, values) for rank, values in enumerate(numbers[0]["shards"])]
    found = {}
    for source, role, rank, values in counted:
        for statistic, value in values.items():
            if statistic.startswith(REPEATED):
                continue
            row = described(source, statistic)
            assert row is not None, f"{source} {statistic} has no description"
            metric, labels = row
            assert not labels
            found[metric.name + "_total" * metric.is_counter, role, str(rank)] = value
    return found


def test_what_prometheus_holds_is_what_the_job_counted(tmp_path: Path) -> None:
    first = free_ports(2 + SHARDS + WORKERS)
    own, ports = first, range(first + 1, first + 2 + SHARDS + WORKERS)
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"rule_files: [{DEPLOY / 'rules.yml'}]\n"
        "scrape_configs:\n  - job_name: axon_ps\n"
        f"    authorization: {{credentials: {TOKEN}}}\n"
        f"    static_configs: [{{targets: {[f'127.0.0.1:{port}' for port in ports]}}}]\n"
    )
    job = [sys.executable, "-m", "axon_ps.cli.main", "run", "--http-port", str(ports[0]), "--shards", str(SHARDS)]
    job += ["--nproc-per-node", str(WORKERS), str(Path(__file__).with_name("observed_worker.py")), str(tmp_path)]
    server = [program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}"]
    server += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{own}"]
    with (
        running(job, tmp_path / "job.log", AXON_PS_TOKEN=TOKEN) as launched,
        running(server, tmp_path / "prometheus.log"),
    ):
        files = [tmp_path / f"{rank}.json" for rank in range(WORKERS)]
        until(lambda: all(file.exists() for file in files) or launched.poll() is not None, tmp_path)
        assert launched.poll() is None, (tmp_path / "job.log").read_text()
        numbers = [json.loads(file.read_text()) for file in files]
        counted_at = time.time()
        newest = f"min(timestamp(process_resident_memory_bytes) and on (instance) up == 1) > {counted_at + 1.0}"
        until(lambda: query(own, newest) and len(query(own, "up == 1")) == len(ports), tmp_path)
        held = {
            (s["metric"]["__name__"], s["metric"]["role"], s["metric"].get("rank", "")): float(s["value"][1])
            for s in query(own, '{__name__=~"axon_ps_.*",role=~"worker|shard"}')
        }
        of_job = {s["metric"]["__name__"]: float(s["value"][1]) for s in query(own, '{role="coordinator"}')}
        undescribed = query(own, "axon_ps_undescribed")
        (tmp_path / "go").touch()
        assert launched.wait(60) == 0, (tmp_path / "job.log").read_text()
    wanted = expected(numbers)
    assert len(wanted) > 100
    different = {key: (value, held.get(key)) for key, value in wanted.items() if held.get(key) != value}
    assert not different, "(counted, held by Prometheus)"
    assert not undescribed
    assert of_job["axon_ps_steps_committed_total"] == of_job["axon_ps_model_version"] == numbers[0]["version"]
    assert (of_job["axon_ps_workers"], of_job["axon_ps_shards"]) == (WORKERS, SHARDS)
    assert of_job["axon_ps_losses_total"] == 0


def test_rules_and_configuration_are_what_promtool_takes() -> None:
    for kind, file in (("rules", "rules.yml"), ("config", "prometheus.yml")):
        subprocess.run([program("promtool"), "check", kind, str(DEPLOY / file)], check=True, timeout=30)


def test_the_dashboard_and_the_rules_name_metrics_that_exist() -> None:
    known = {m.name + "_total" * m.is_counter for rows in TABLE.values() for m in rows.values()} | {
        "axon_ps_undescribed"
    }
    known |= {name.replace("axon_ps_", "axon_ps_model_", 1) for name in known}
    texts = [(ROOT / "deploy/grafana/axon_ps.json").read_text(), (DEPLOY / "rules.yml").read_text()]
    named = {name for text in texts for name in re.findall(r"\baxon_ps_\w+", text)}
    assert named
    assert named <= known
