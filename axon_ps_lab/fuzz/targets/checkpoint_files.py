"""Target: the readers of checkpoints, each fed hostile directories beside a good one.

A directory is read as in a job: by a coordinator at its start, by `axon-ps checkpoint ls | verify | export`, by a
coordinator with the request to restore it, by shard servers with live parameters and the order to restore it, by
workers for their own state and buffers, and by a worker without servers. Each read has to end soon, with a result or an
error of our tree. A start has to find the good checkpoint, or this one if it can be read.

Every server has to load a checkpoint that the coordinator has checked, and the job has to train on. A server that
refuses a checkpoint must have all its former values, bit by bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch
from safetensors.numpy import save
from torch import nn

from axon_ps.cli.main import main as command_line
from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.server import manifests, retention, server
from axon_ps.errors import AxonError, InternalError
from axon_ps.observe.work import LongWork
from axon_ps.parallel.checkpoints import own_state
from axon_ps.parallel.checkpoints.buffers import ModuleBuffers
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.apply import VersionPins
from axon_ps.shard.server.model_values import ModelValues
from axon_ps.shard.server.reports import ServerShell
from axon_ps.shard.server.waiters import EventOrder, Waiters
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.contents import read_attached
from axon_ps.storage.manifest import MANIFEST_NAME, Manifest, read_manifest, write_attached, write_manifest
from axon_ps.texts import printable
from axon_ps.types import DType, OptimizerSpec
from axon_ps.wire.events import RestoreOrder
from axon_ps_lab.engine_driver import Servers
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Case, Findings, where
from axon_ps_lab.fuzz.hostile.directories import Directories, Directory, remove

GOOD: Final = "good"
SLOW_S: Final = 10.0
"""Processor seconds of a read; a read that takes more is a finding, and most take a few ms."""

SERVERS: Final = 2
_LAYOUT: Final = Layout(
    units=(
        build_unit("first", [("w", (5, 20), DType.F32), ("b", (7,), DType.BF16)]),
        build_unit("second", [("x", (130,), DType.F32)]),
        build_unit("frozen", [("y", (3, 3), DType.F16)], trainable=False),
    )
)
_OPTIONS: Final = PlanOptions(chunk_numel=32, min_slice_numel=8)
_SPEC: Final = JobSpec(layout=_LAYOUT, options=_OPTIONS)
_MODEL: Final = "model 0"


def _optimizer(name: str = "adamw", **hyper: float) -> OptimizerSpec:
    return OptimizerSpec(name=name, groups=({"lr": 0.01, **hyper}, {"lr": 0.02}), group_of=(0, 1, 0, -1))


def _trained(num_servers: int, optimizer: OptimizerSpec, steps: int, seed: int = 0) -> Servers:
    """Return shard servers that have values and have made steps."""
    servers = Servers(_SPEC, num_servers, optimizer=optimizer)
    rng = np.random.default_rng(seed)
    servers.upload([rng.standard_normal(unit.numel).astype(np.float32) for unit in _LAYOUT.units])
    for _ in range(steps):
        _step(servers, rng)
    return servers


def _step(servers: Servers, rng: np.random.Generator) -> None:
    for index, unit in enumerate(_LAYOUT.units):
        if unit.trainable:
            servers.push(index, 0, rng.standard_normal(unit.numel).astype(np.float32))
    servers.commit()


def _section(servers: Servers, uri: str, optimizer: OptimizerSpec | None, name: str) -> Manifest:
    """Write the servers' files; returns their manifest, which is not written."""
    count, files = len(servers.engines), []
    for rank, engine in enumerate(servers.engines):
        pins = VersionPins()
        files.append(snapshot.write(engine, uri, servers.version, rank, count, pins, pins.pin(servers.version)))
    return Manifest(
        job="fuzzed",
        name=name,
        version=servers.version,
        layout=_LAYOUT,
        optimizer=optimizer,
        num_servers=count,
        options=_OPTIONS,
        files=tuple(files),
        slices_in=tuple(s.server for s in servers.plan.numbered),
        committed={"samples": "128", "loader": '{"epoch": 1, "order": [3, 1, 2]}'},
        created="2026-01-02T03:04:05+00:00",
        extra={"scheduler": {"last": 3, "rates": [0.1, None, True]}},
    )


def seeds(directory: Path) -> list[dict[str, bytes]]:
    """Write and return real checkpoints: of one and several servers, with and without optional contents."""
    made = []
    kinds = ((2, _optimizer()), (3, _optimizer("sgd", momentum=0.9)), (1, _optimizer(amsgrad=1.0)), (2, None))
    for number, (count, optimizer) in enumerate(kinds):
        uri = str(directory / f"seed-{number}")
        servers = _trained(count, optimizer or _optimizer("sgd"), 3, number)
        section = _section(servers, uri, optimizer, _MODEL)
        if number == 0:
            buffers = save({"mean": np.zeros(4, np.float32), "steps": np.ones((), np.int64)})
            state = {"state": _STATE, "rank_state": {"rng": torch.get_rng_state(), "at": (1, 2.5)}}
            section = _with(section, uri, buffers, {0: own_state._write(uri, 0, state)})
        write_manifest(uri, section)
        made.append({path.name: path.read_bytes() for path in sorted(Path(uri).iterdir())})
    return made


_STATE: Final = {
    "scheduler": {"epoch": 3, "rates": [0.1, 0.2], "names": ("a", "b"), "seen": {1, 2}},
    "table": {3: torch.arange(4), (1, 2): np.arange(3), "raw": b"bytes", "nan": float("nan")},
}


def _with(section: Manifest, uri: str, buffers: bytes, states: dict[int, Any]) -> Manifest:
    from dataclasses import replace

    return replace(section, attached=write_attached(uri, {f"buffers/{_MODEL}": buffers}), states=states)


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 7.0))
        self.register_buffer("steps", torch.tensor(7))


class _Reports:
    """Collects the reports of a server."""

    rank = 0

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.errors: list[AxonError] = []

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        self.done.append((version, epoch))

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        self.errors.append(error)


class _Shell:
    """A stand-in for `ShardShell`, in which the caller's thread works on files."""

    def __init__(self) -> None:
        self.reports = _Reports()
        self.started: list[Coroutine[Any, Any, None]] = []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.started.append(coroutine)

    async def in_files_thread(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except AxonError:
            raise
        except Exception as error:  # as `ShardShell` does
            raise InternalError(f"{where(error)}: {error}") from error

    @contextlib.contextmanager
    def working(self, kind: str) -> Iterator[LongWork]:
        yield LongWork(kind)


def _restored(engine: ShardEngine, order: RestoreOrder) -> _Reports:
    """Have a server perform an order, as `ModelShell` does; returns its reports."""
    shell = _Shell()

    async def perform() -> None:
        events: EventOrder[RestoreOrder] = EventOrder(lambda order: None, lambda order: False)
        values = ModelValues(0, engine, cast(ServerShell, shell), Waiters(), events, lambda: None)
        values.begin(order)
        for coroutine in shell.started:
            await coroutine

    asyncio.run(perform())
    return shell.reports


def _bits(engine: ShardEngine) -> list[bytes]:
    """Return all that a server holds of a model."""
    found = [f"{engine.version} {engine.parameters.serving}".encode()]
    for number, owned in sorted(engine.slices.items()):
        master = owned.master
        found += [f"{number} {owned.lacking} {master.parameter_updates()}".encode(), master.values.tobytes()]
        found += [array.tobytes() for _, array in sorted(master.state.items())]
        found += [bytes(frame) for frame in owned.wire.frames]
    return found


class CheckpointFiles:
    """See the module.

    Args:
        findings: gets the findings.
        directory: directory for the checkpoints' directories.
    """

    name = "files"

    def __init__(self, findings: Findings, directory: str) -> None:
        self.messages = 0
        self.ends: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._findings = findings
        self._made = tempfile.TemporaryDirectory(dir=directory)
        self._parent = Path(self._made.name) / "checkpoints"
        self._parent.mkdir()
        self._target = Path(self._made.name) / "out" / "model.safetensors"
        found = seeds(Path(self._made.name))
        self._directories = Directories(found)
        Directory(GOOD, found[1]).write(self._parent)
        self._live: Servers | None = None
        self._case = Case(self.name, "")
        logging.getLogger("axon_ps").setLevel(logging.CRITICAL)

    def close(self) -> None:
        """Remove the files that were written."""
        logging.getLogger("axon_ps").setLevel(logging.NOTSET)
        self._made.cleanup()

    def run(self, entropy: Entropy) -> None:
        """Read one directory."""
        directory = self._directories.grow(entropy)
        self._perform(directory, every=entropy.once_in(4))

    def replay(self, case: Case) -> None:
        """Read the directory that a finding's file describes."""
        self._perform(Directory.decoded(case.messages[0]), every=True)

    def _perform(self, directory: Directory, *, every: bool) -> None:
        self.messages += 1
        self._case = Case(
            self.name, directory.name.encode("utf-8", "backslashreplace").decode(), (directory.encoded(),)
        )
        path = directory.write(self._parent)
        try:
            uri = str(path)
            manifest = self._read("manifest", lambda: read_manifest(uri))
            self._start(path, readable=manifest is not None)
            self._restore(uri, manifest)
            self._workers(uri, manifest)
            for command in ("ls", "verify", "export") if every else ():
                self._command(command, uri, path)
        finally:
            remove(path)

    def _read(self, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of a reader; None if it raised an error."""
        began_s, result = time.process_time(), None
        try:
            result = call()
            self.ends[f"{what}: ok"] += 1
        except InternalError as error:
            self._add(f"{what}: an internal error", error)
        except AxonError as error:
            self.ends[f"{what}: {type(error).__name__}"] += 1
            if len(str(error)) > 3000:
                self._add(f"{what}: a message of {len(str(error))} characters", error)
        except Exception as error:
            self._add(f"{what}: {where(error)}", error)
        took_s = time.process_time() - began_s
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > SLOW_S:
            self._findings.add(f"{what}: it takes longer than {SLOW_S:g} s", [self._case], f"{took_s:.1f} s")
        return result

    def _add(self, what: str, error: BaseException) -> None:
        self._findings.add(what, [self._case], "".join(traceback.format_exception(error))[-3000:])

    # ------------------------------------------------------------------ the coordinator

    def _start(self, path: Path, *, readable: bool) -> None:
        """Start as a coordinator does, which finds the good checkpoint, or this one if it is sound and newer."""
        policy, logged = CheckpointPolicy(directory=str(self._parent), every_steps=1), list[str]()
        config = CoordinatorConfig(checkpoints=policy)
        begun = self._read("start", lambda: server._resume(config))
        if begun not in (str(self._parent / GOOD), str(path)):
            self._findings.add("start: the good checkpoint was not found", [self._case], repr(begun))
        self._read("newest", lambda: retention.newest(policy.directory, lambda uri, _: logged.append(uri)))
        if not (readable or logged) and os.path.lexists(path / MANIFEST_NAME):
            self._findings.add("start: a damaged checkpoint is passed over in silence", [self._case])
        if any(not uri.isprintable() for uri in logged):
            self._findings.add("start: a name that is not printable is logged", [self._case], repr(logged))

    def _restore(self, uri: str, manifest: Manifest | None) -> None:
        """Check it as a coordinator does for a job that has values, and let servers load it in any case."""
        found = self._read("check", lambda: manifests.find_complete(uri, {_MODEL: _SPEC}, read=True))
        unchecked = self._read("find", lambda: manifests.find(uri, {_MODEL: _SPEC}))
        if found is None and unchecked is None and manifest is None:
            order = RestoreOrder(epoch=1, uri=uri, version=3)
        else:
            resume = (found or unchecked or SimpleNamespace(resumes=[None])).resumes[0]
            order = RestoreOrder(
                epoch=1,
                uri=uri,
                version=resume.version if resume else manifest.version if manifest else 3,
                section=resume.section if resume else "",
                sha256=resume.sha256 if resume else "",
            )
        live = self._live = self._live or _trained(SERVERS, _optimizer(), 2, seed=9)
        done = 0
        for engine in live.engines:
            before = _bits(engine)
            reports = self._read("server", lambda engine=engine: _restored(engine, order))  # type: ignore[misc]
            if reports is not None and reports.done:
                done += 1
                self.ends["server: restored"] += 1
            elif _bits(engine) != before:
                text = str(reports and reports.errors)
                self._findings.add("server: it has given up live parameters", [self._case], text)
            elif reports is not None and any(isinstance(error, InternalError) for error in reports.errors):
                self._findings.add("server: an internal error", [self._case], str(reports.errors))
            if done and not (reports and reports.done) and found is not None:
                self._findings.add("server: it refuses what the coordinator has checked", [self._case])
        if found is not None and done < SERVERS:
            self._findings.add("server: it refuses what the coordinator has checked", [self._case])
        if done:
            self._live = None
        if done == SERVERS:
            self._train(live)

    def _train(self, servers: Servers) -> None:
        """Make a step with the restored values."""
        try:
            _step(servers, np.random.default_rng(0))
            self.ends["step: ok"] += 1
        except Exception as error:
            self._add(f"step: {where(error)}", error)

    # ------------------------------------------------------------------ workers

    def _workers(self, uri: str, manifest: Manifest | None) -> None:
        if manifest is None:
            return
        for rank, entry in manifest.states.items():
            own: dict[str, Any] = {"scheduler": {}, "table": {}}
            mine: dict[str, Any] = {"rng": torch.Generator(), "at": ()}
            files = {0: entry, rank: entry}
            self._read("own state", lambda: own_state.load(uri, files, rank, own, mine))  # noqa: B023
        for key in manifest.attached:
            content = self._read("buffers", lambda: read_attached(manifest, key))  # noqa: B023
            if content is not None:
                module = _Module()
                self._read("buffers of a module", lambda: ModuleBuffers(module, {}).load(content, uri))  # noqa: B023
        engine = ShardEngine()
        engine.configure(_SPEC, 0, 1)

        def read_locally() -> None:
            with contextlib.closing(snapshot.prepare(engine, uri, manifest.version, manifest.name)) as restore:
                snapshot.load(engine, restore)

        self._read("without servers", read_locally)

    # ------------------------------------------------------------------ people

    def _command(self, command: str, uri: str, path: Path) -> None:
        """Run a command: it must report an error in a line that names the directory, and show no traceback."""
        arguments = ["checkpoint", command, uri]
        if command == "export":
            arguments.append(str(self._target))
        if command != "ls":
            arguments.append("--no-progress")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self._read(command, lambda: command_line(arguments))
        logged = err.getvalue()
        if code is None or "Traceback" in logged or "\x1b" in logged + out.getvalue():
            self._findings.add(f"{command}: a traceback, or escapes for a terminal", [self._case], logged[-3000:])
        elif code and printable(path.name.replace("\n", " ")) not in logged:
            self._findings.add(f"{command}: it does not say where", [self._case], logged[-3000:])
        if code and self._target.exists():
            self._findings.add(f"{command}: a file of what failed is left", [self._case], logged[-3000:])
        self._target.unlink(missing_ok=True)


def described(target: CheckpointFiles) -> str:
    """Return the ends of reads, as text."""
    return json.dumps(dict(sorted(target.ends.items())), indent=1)
