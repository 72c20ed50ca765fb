"""The lines of docs/containers.md on a real container engine: sizes, scaling up and down, the death of each service.

    make lab NAME=compose        # needs docker and docker-compose, or the plug-in `docker compose`; builds the images

A job trains all the while. After each event it has to go on, with every member back, a copy of
every slice, and no committed step lost. Every container is examined: it can write only to its volumes and /tmp, has no
capability of root's, and no program but Python. The campaign prints a table, and writes
benchmarks/results/compose.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from axon_ps_lab import report
from axon_ps_lab.containers.watch import SMALL, Watch, address_of, output_of

ROOT = Path(__file__).resolve().parents[2]
PROJECT, JOB, TOKEN = "axon-ps-test", "gpt", "the-random-secret-of-a-test"
BASE = "python:3.11-slim-bookworm"
LIMITS_MB = {"coordinator": 450, "shard": 450, "worker": 1500}
PUBLISHED_BASE_MB = 130
"""The size of the published base image. An engine without a registry may have another image under its name."""


class Compose:
    """docker-compose on our file, with a small model.

    Args:
        directory: the folder of the file that names the model.
    """

    def __init__(self, directory: Path) -> None:
        self._command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        small = directory / "small.json"  # JSON is YAML
        command = ["--nnodes=2", *SMALL]
        small.write_text(json.dumps({"services": {"worker": {"command": command}}}))
        self._files = ["-p", PROJECT, "-f", str(ROOT / "docker-compose.yml"), "-f", str(small)]
        self._environment = {**os.environ, "AXON_PS_TOKEN": TOKEN}

    def __call__(self, *arguments: str) -> str:
        """Run a command of docker-compose; returns its output.

        Raises:
            AssertionError: it fails.
        """
        command = [*self._command, *self._files, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout.strip()

    def containers(self, service: str) -> list[str]:
        """Return the running containers of a service."""
        labels = f"label=com.docker.compose.project={PROJECT}", f"label=com.docker.compose.service={service}"
        return sorted(output_of("docker", "ps", "-q", "--filter", labels[0], "--filter", labels[1]).split())

    def crash(self, service: str) -> None:
        """Kill the main process of a service's first container; after `docker kill` it would not be restarted."""
        process = output_of("docker", "inspect", "-f", "{{.State.Pid}}", self.containers(service)[0])
        os.kill(int(process), 9)

    def address(self) -> str:
        """Return the coordinator's address."""
        (container,) = self.containers("coordinator") or [""]
        return f"{address_of(container)}:7077"


def image_sizes(prefix: str = "axon-ps-") -> list[dict[str, object]]:
    """Return the sizes of the images, with and without their base; each must be within its limit."""
    base = int(output_of("docker", "image", "inspect", "-f", "{{.Size}}", _base_of(f"{prefix}shard")))
    rows = []
    for service, limit in LIMITS_MB.items():
        size = int(output_of("docker", "image", "inspect", "-f", "{{.Size}}", f"{prefix}{service}"))
        ours = (size - base) / 1e6
        rows.append({"image": f"{prefix}{service}", "mb": size / 1e6, "base_mb": base / 1e6, "ours_mb": ours})
        assert ours + PUBLISHED_BASE_MB <= limit, rows[-1]
        user = output_of("docker", "image", "inspect", "-f", "{{.Config.User}}", f"{prefix}{service}")
        assert user == "10001:10001", user
    return rows


def _base_of(image: str) -> str:
    """Return the local image with whose layers an image begins."""
    layers = "{{json .RootFS.Layers}}"
    first = json.loads(output_of("docker", "image", "inspect", "-f", layers, image))[0]
    for candidate in output_of("docker", "images", "-q").split():
        if json.loads(output_of("docker", "image", "inspect", "-f", layers, candidate)) == [first]:
            return candidate
    return BASE


def confinement(container: str) -> dict[str, object]:
    """Return the permissions of the main process of a running container.

    Raises:
        AssertionError: it has a permission that docker-compose.yml is to take from it.
    """
    probe = Path(__file__).with_name("confined.py").read_text(encoding="utf-8")
    command = ["docker", "exec", "-i", container, "python", "-"]
    done = subprocess.run(command, input=probe, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    found: dict[str, object] = json.loads(done.stdout)
    by_engine = 2 if "name=seccomp" in output_of("docker", "info", "-f", "{{.SecurityOptions}}") else 0
    wanted = {"user": "10001", "capabilities": [], "no_new_privileges": True, "seccomp": by_engine, "writable": [],
              "temporary": True, "programs": []}  # fmt: skip
    assert found == wanted, f"{container} may do {found}, not {wanted}"
    return found


@contextmanager
def started(compose: Compose) -> Iterator[Watch]:
    """Start the services and workers, and remove them when the context ends."""
    compose("up", "--force-recreate", "-V", "-d")
    try:
        with Watch(compose.address, TOKEN, JOB) as watch:
            yield watch
    except BaseException:
        print(compose("logs", "--tail", "40"), file=sys.stderr)
        raise
    finally:
        compose("down", "-v", "-t", "5")


def main() -> None:
    """Build, run everything, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        compose = Compose(Path(directory))
        compose("config", "-q")
        if not options.no_build:
            compose("build")
        sizes = image_sizes()
        columns = list(sizes[0])
        report.table("Images", columns, [[row[c] for c in columns] for row in sizes])
        confined: dict[str, object] = {}
        rows = run(compose, confined)
    columns = list(rows[0])
    report.table("Compose", columns, [[row[c] for c in columns] for row in rows])
    print(f"wrote {report.write('compose', rows, images=sizes, confined=confined)}")


def run(compose: Compose, confined: dict[str, object]) -> list[dict[str, object]]:
    """Make all events happen to a job that trains; `confined` gets the permissions of the containers by service."""
    rows: list[dict[str, object]] = []

    def event(what: str, act: Callable[[], object], workers: int, shards: int) -> None:
        watch.mark()
        act()
        if "coordinator" in what:  # the members stay the same
            version = watch.version
            watch.until("steps are made", lambda status: status.version > version + 20)
        else:
            watch.settled(workers, shards)
        seen = watch.seen
        assert not watch.lost, f"{watch.lost} committed steps are lost after: {what}"
        row = {"event": what, "committed": seen.committed, "aborted": seen.aborted, "pause_s": seen.pause_s, "lost": 0}
        rows.append(row)
        print(f"{what}: {seen}", flush=True)

    def scale(**services: int) -> Callable[[], object]:
        counts = [f for name, count in services.items() for f in ("--scale", f"{name}={count}")]
        return lambda: compose("up", "-d", "--no-recreate", *counts)

    with started(compose) as watch:
        watch.settled(2, 2)
        for service in LIMITS_MB:
            for container in compose.containers(service):
                confined[service] = confinement(container)
        event("workers from 2 to 4", scale(worker=4, shard=2), 4, 2)
        event("shard servers from 2 to 3", scale(worker=4, shard=3), 4, 3)
        event("workers from 4 to 2", scale(worker=2, shard=3), 2, 3)
        event("shard servers from 3 to 2", scale(worker=2, shard=2), 2, 2)
        assert rows[-1]["aborted"] == 0, "a server that is stopped hands over first"
        for service in ("worker", "shard", "coordinator"):
            event(f"a {service} crashes", lambda service=service: compose.crash(service), 2, 2)  # type: ignore[misc]
        for service in ("worker", "shard", "coordinator"):

            def kill_and_start(service: str = service) -> None:
                compose("kill", service)
                compose("start", service)

            if service != "shard":  # `kill` takes all of a service, and two servers hold all there is
                event(f"kill {service}; start {service}", kill_and_start, 2, 2)
    return rows


if __name__ == "__main__":
    main()
