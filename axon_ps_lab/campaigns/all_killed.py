"""Everything killed at once, again and again: `make lab NAME=all-killed`.

    python -m axon_ps_lab.campaigns.all_killed [--kills 20] [--seed 1] [--state sqlite|memory]

The supervisor here does what systemd or a restart policy of containers does: it runs one `axon-ps run` command, and
when that is gone it runs the same again. At moments drawn from the seed it stops the launcher, the coordinator, the
shard servers and the workers, and kills them all (-9). After some lives it also damages the newest checkpoint. Each
life must begin at the newest checkpoint that is complete and unaltered, and the log must name the altered one. In the
end the parameters must have the bits of a run without kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from axon_ps.errors import AxonError
from axon_ps.observe import moments
from axon_ps.observe.moments import Moment
from axon_ps.storage.contents import verify
from axon_ps.storage.manifest import Manifest, list_checkpoints

LIFE_S = 400.0
"""The longest that a life may last."""

AFTER_START_S = 1.5
"""A random moment is at most this long after the start of a life, or after a worker's first note."""

STEPS_PER_LIFE = 20
STEP_S = 0.05
"""A worker waits this long after a step, so that the job outlives all its kills."""

EVERY = 3
LIMIT = 2

STOP_AT, STOPPED = "ALL_KILLED_STOP_AT", "ALL_KILLED_STOPPED"

TRAIN = """
import hashlib, json, os, sys, time
import torch
import axon_ps
from axon_ps.parallel import FSDP, Adam
from axon_ps.sharding.plan import PlanOptions

torch.set_num_threads(1)
log, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def note(**values):
    with open(log, "a") as file:
        file.write(json.dumps({"rank": world.rank, **values}) + "\\n")

with axon_ps.World.init(timeout_s=60.0) as world:
    torch.manual_seed(0)
    model = FSDP(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)), world,
        unit_types={torch.nn.Linear}, plan_options=PlanOptions(chunk_numel=1024, min_slice_numel=256),
    )
    optimizer = Adam(model, lr=1e-3)
    note(began=world.version)
    while world.version < steps:
        torch.manual_seed(1000 * world.version + world.rank)
        model(torch.randn(16, 64)).square().mean().backward()
        result = optimizer.step()
        optimizer.zero_grad()
        note(version=result.version)
        time.sleep(pause_s)
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    note(digest=hashlib.sha256(values).hexdigest())
"""


def watch() -> None:
    """Stop this service for good when it reaches the supervisor's moment, and write a file then."""
    name, file = os.environ.get(STOP_AT), os.environ.get(STOPPED)

    def watcher(moment: Moment, version: int) -> None:
        if moment.name == name and file and not os.path.exists(file):
            Path(file).write_text(str(version))
            time.sleep(LIFE_S)

    moments.watch(watcher)


if STOP_AT in os.environ:
    watch()


DAMAGES = ("flip data", "cut data", "remove data", "flip manifest", "cut manifest", "empty manifest")


def damage(directory: Path, how: str, choice: random.Random) -> None:
    """Alter, truncate or remove a file of a checkpoint."""
    what, _, kind = how.partition(" ")
    files = sorted(path for path in directory.iterdir() if (path.suffix == ".json") == (kind == "manifest"))
    file = choice.choice(files)
    content = file.read_bytes()
    at = choice.randrange(len(content) // 4, len(content))
    if what == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << 6]) + content[at + 1 :])
    elif what == "cut":
        file.write_bytes(content[:at])
    elif what == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()


@dataclass
class Life:
    """One life of the job."""

    moment: str
    delay_s: float = 0.0
    damage: str = ""


def lives(kills: int, seed: int) -> Iterator[Life]:
    """Yield lives that end in a kill, with each kind of moment and damage; the first has no checkpoint to damage."""
    choice = random.Random(seed)
    kinds = ["any", Moment.CHECKPOINT.name, "start", Moment.REMOVE.name, "any", Moment.RESTORE.name]
    damages = [*DAMAGES]
    choice.shuffle(damages)
    for number in range(kills):
        kind = kinds[number % len(kinds)]
        harm = damages[number // 3 % len(damages)] if number % 3 == 2 else ""
        yield Life(kind, choice.uniform(0.0, AFTER_START_S) if number else 0.0, harm)


@dataclass
class Result:
    """The outcome of a supervised job.

    Attributes:
        digest: digest of the parameters at its end.
        lines: one about each life.
        wrong: promises that were broken.
    """

    digest: str = ""
    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Supervisor:
    """Runs one command again and again.

    Args:
        directory: the folder of all files.
        state: "sqlite" (a file of the directory) or "memory".
        seed: seed of the choices of damage.
        steps: the version at which the job is done.
        step_s: seconds that a worker waits after each.
        workers, shards: their numbers.
    """

    def __init__(
        self,
        directory: Path,
        state: str,
        seed: int,
        *,
        steps: int,
        step_s: float = STEP_S,
        workers: int = 2,
        shards: int = 2,
    ) -> None:
        self._directory = directory
        self._checkpoints = directory / "checkpoints"
        self._notes = directory / "notes"
        self._choice = random.Random(seed)
        script = directory / "train.py"
        script.write_text(TRAIN)
        self._command = [
            *(sys.executable, "-P", "-m", "axon_ps.cli.main", "run"),
            *("--nproc-per-node", str(workers), "--shards", str(shards)),
            *("--state", str(directory / "state.sqlite") if state == "sqlite" else "memory"),
            *(
                "--checkpoint-dir",
                str(self._checkpoints),
                "--checkpoint-every",
                str(EVERY),
                "--checkpoint-limit",
                str(LIMIT),
            ),
            *("--plugins", "axon_ps_lab.campaigns.all_killed", str(script), str(self._notes), str(steps), str(step_s)),
        ]
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")}
        path = os.pathsep.join(filter(None, sys.path))
        self._environment |= {"PYTHONPATH": path, "AXON_PS_LOG_LEVEL": "INFO", STOPPED: str(directory / "stopped")}

    def run(self, kills: Sequence[Life]) -> Result:
        """Run the job and kill it once for each life, and then run it to its end."""
        result = Result()
        expected, harmed, logs = 0, "", ""
        for number, life in enumerate([*kills, None]):
            began_s = time.monotonic()
            log = self._directory / f"life-{number}.log"
            self._notes.write_text("")
            Path(self._environment[STOPPED]).unlink(missing_ok=True)
            environment = self._environment | ({STOP_AT: life.moment} if life else {})
            with open(log, "wb") as output:
                process = subprocess.Popen(self._command, stdout=output, stderr=output, env=environment)
                try:
                    self._live(process, life)
                finally:
                    kill_all(process)
            text, notes = log.read_text(errors="replace"), self._read_notes()
            logs += text
            stepped = any("version" in note for note in notes)
            if harmed and stepped and f"{harmed} is passed over: " not in logs:
                result.wrong.append(f"life {number}: nobody says that {harmed} is passed over")
            for began in {int(str(note["began"])) for note in notes if "began" in note}:
                if began < expected:
                    result.wrong.append(f"life {number} began at {began}; there was a checkpoint of {expected}")
            if life is None and (process.returncode != 0 or not self._digests()):
                result.wrong.append(f"the last life failed with {process.returncode}:\n{text[-4000:]}")
            before, harmed = expected, "" if stepped else harmed
            newly = ""
            if life is not None and life.damage and (newly := self._damage_newest(life.damage)):
                harmed, logs = newly, ""
            expected = max((m.version for m in self._complete()), default=0)
            reached = max((int(str(n["version"])) for n in notes if "version" in n), default=before)
            what = life.moment if life else "to the end"
            harm = f", {life.damage} of a newer one" if life and newly else ""
            result.lines.append(
                f"life {number:2} ({what:10}): began at {before:3}, reached {reached:3}, newest good checkpoint "
                f"{expected:3}{harm}, {time.monotonic() - began_s:.1f} s"
            )
            print(result.lines[-1], flush=True)
        digests = self._digests()
        if len(digests) != 1:
            result.wrong.append(f"the workers end with {len(digests)} different values")
        result.digest = next(iter(digests), "")
        return result

    def _live(self, process: subprocess.Popen[bytes], life: Life | None) -> None:
        """Return at the moment of the kill, or when the job is over.

        Raises:
            AxonError: neither came.
        """
        deadline = time.monotonic() + LIFE_S
        at = time.monotonic() + life.delay_s if life is not None and life.moment == "start" else None
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise AxonError(f"a life did not end in {LIFE_S:g} s:\n{self._tail()}")
            if life is not None and life.moment == "any" and at is None and self._notes.stat().st_size:
                at = time.monotonic() + life.delay_s
            if at is not None and time.monotonic() >= at:
                return
            if life is not None and Path(self._environment[STOPPED]).exists():
                return
            if life is not None and life.moment == Moment.RESTORE.name and '"version"' in self._notes.read_text():
                return  # there was nothing to restore
            time.sleep(0.005)

    def _tail(self) -> str:
        return sorted(self._directory.glob("life-*.log"), key=lambda path: path.stat().st_mtime)[-1].read_text()[-4000:]

    def _read_notes(self) -> list[Mapping[str, object]]:
        return [json.loads(line) for line in self._notes.read_text().splitlines() if line.endswith("}")]

    def _digests(self) -> set[str]:
        return {str(note["digest"]) for note in self._read_notes() if "digest" in note}

    def _complete(self) -> list[Manifest]:
        """Return the checkpoints that are complete and unaltered."""
        found = []
        for manifest in list_checkpoints(str(self._checkpoints)):
            try:
                found.append(verify(manifest.uri))
            except AxonError:
                continue
        return found

    def _damage_newest(self, how: str) -> str:
        """Damage the checkpoint that was written last, unless it is the only one; returns its URI, or ""."""
        found = sorted(self._complete(), key=lambda manifest: manifest.created)
        if len(found) < 2:
            return ""
        damage(Path(found[-1].uri), how, self._choice)
        return found[-1].uri


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants at once: none of them observes the death of another."""
    with_all: dict[int, psutil.Process] = {}
    try:
        root = psutil.Process(process.pid)
        for _ in range(3):  # a process started meanwhile is found in the next round: its parent has been stopped
            for found in (root, *root.children(recursive=True)):
                if found.pid not in with_all:
                    with_all[found.pid] = found
                    found.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
    for found in with_all.values():
        try:
            found.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs([found for found in with_all.values() if found.pid != process.pid], timeout=20)


def undisturbed(directory: Path, *, steps: int, workers: int = 2, shards: int = 2) -> str:
    """Return the digest of a run without kills.

    Raises:
        AxonError: the run failed.
    """
    directory.mkdir()
    result = Supervisor(directory, "memory", 0, steps=steps, step_s=0.0, workers=workers, shards=shards).run([])
    if result.wrong:
        raise AxonError("\n".join(result.wrong))
    return result.digest


def main() -> int:
    """Run the campaign; returns 1 if something was wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", choices=("sqlite", "memory"), action="append")
    options = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="all-killed-") as folder:
        steps = STEPS_PER_LIFE * (options.kills + 1)
        expected = undisturbed(Path(folder, "undisturbed"), steps=steps)
        for state in options.state or ("sqlite", "memory"):
            directory = Path(folder, state)
            directory.mkdir()
            result = Supervisor(directory, state, options.seed, steps=steps).run(
                list(lives(options.kills, options.seed))
            )
            wrong += [f"{state}: {text}" for text in result.wrong]
            same = result.digest == expected
            wrong += [] if same else [f"{state}: the parameters are not those of a run that nothing happened to"]
            print(f"{state}: {options.kills} times everything killed; {'the same bits' if same else 'OTHER VALUES'}")
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
