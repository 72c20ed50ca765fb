"""The costs of this library on this machine: `axon-ps doctor --measure FILE` writes them as a `Profile`.

Owns: the method of each measurement. Every figure but the time of a decision is in processor seconds: of this process,
which is the worker, and of a shard server on this host. Everything is sent between them, as between two hosts; no
memory is shared. Each figure is the median of several repetitions.

A step is measured in three intervals:

    push      of a large unit, until the server has added it
    commit    vote, decision, the optimizer's update, and the encoding of the new version
    gather    of the large unit at the new version

A version is encoded once, however many workers gather it: its cost is that of the commit without the optimizer's
arithmetic, which is measured by itself. The costs of a push and a gather beside their elements are measured with small
units, and subtracted.

Figures are differences, and noise can make a small one 0 or less; it is replaced by `FLOOR_S` then.

Note: [Processor time of another process]
    The kernel brings the clock of a process up to date when the process sleeps, and at timer interrupts, which are
    milliseconds apart. So clocks are read after a pause, in which the server has finished and sleeps.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.optim import create, names
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.precision import WirePrecision
from axon_ps.storage.files import LocalFileStore
from axon_ps.testing.cluster import LocalCluster
from axon_ps.types import WIRE_DTYPES, Array, DType, OptimizerSpec, Role
from axon_ps.worker.environment import worker_config
from axon_ps.worker.world import World
from axon_ps_lab.simulate.profile import Profile, WireCost

if TYPE_CHECKING:
    from axon_ps.collectives.work import LoopWork

FLOOR_S: Final = 1e-12
"""The least figure: where less was measured, noise was larger than the figure."""

_TIMEOUT_S: Final = 120.0
_SETTLE_S: Final = 0.003
_HYPER: Final = ({"lr": 1e-3},)


def _wires() -> dict[str, WirePrecision]:
    """Return the forms in which both parameters and gradients are sent, by name."""
    names = [*(dtype.torch_name for dtype in WIRE_DTYPES), "int8", "int4"]
    return {name: WirePrecision.of(name, name, ("wire", "wire")) for name in names}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        large_numel: elements of the large unit, and of an optimizer's update.
        small_numel: elements of a small unit.
        calls: small units, each of which is pushed and gathered by a call of its own.
        repetitions: number of repetitions of each measurement.
    """

    large_numel: int = 4 << 20
    small_numel: int = 64
    calls: int = 32
    repetitions: int = 51


@dataclass(frozen=True)
class _Cost:
    """Processor seconds of the worker and of the shard server."""

    worker_s: float
    server_s: float


def check_target(path: Path) -> None:
    """Refuse a file that could not be written, before anything is measured.

    Raises:
        InvalidRequest: it could not be written.
    """
    directory = path.absolute().parent
    if not directory.is_dir():
        raise InvalidRequest(f"the profile {str(path)!r} cannot be written: there is no directory {str(directory)!r}")
    if path.is_dir():
        raise InvalidRequest(f"the profile {str(path)!r} cannot be written: it is a directory; give another file")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InvalidRequest(f"the profile {str(path)!r} cannot be written: {error}; give another file") from error


def write(profile: Profile, path: Path) -> None:
    """Write a profile to a file, which then has all of it, or its old content.

    Raises:
        AxonError: it cannot be written.
    """
    with LocalFileStore(path.absolute().parent).create(path.name) as file:
        file.write(f"{json.dumps(profile.as_dict(), indent=2)}\n".encode())


def measure(sizes: Sizes, report: Callable[[str], None]) -> Profile:
    """Measure everything; starts a coordinator and a shard server for it, and ends them.

    Args:
        sizes: the sizes of the measurements.
        report: is given a line after each measurement.

    Raises:
        AxonError: a process did not start, or did not answer in time.
    """
    update_s = {}
    for name in names():
        update_s[name] = _update_s(name, sizes)
        report(f"update, {name}: {update_s[name] * 1e9:.2f} ns an element")
    with LocalCluster(shards=1, world_size=1) as cluster:
        config = replace(worker_config(cluster.env(0)), direct_memory=False)
        with World.init(config, timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as world:
            job = _Job(world, cluster.process(Role.SHARD).pid, sizes)
            decision_s = job.decision_s()
            report(f"decision: {decision_s * 1e3:.2f} ms")
            push, gather = job.calls()
            report(f"push of a small unit: {_described(push, 1e6, 'µs')}")
            report(f"gather of a small unit: {_described(gather, 1e6, 'µs')}")
            wires = {}
            for name, precision in _wires().items():
                wires[name] = job.wire(name, precision, push, gather, update_s["sgd"])
                report(f"{name}: measured")
    return Profile(
        cores=len(os.sched_getaffinity(0)),
        worker_call_s=_at_least((push.worker_s + gather.worker_s) / 2),
        server_call_s=_at_least((push.server_s + gather.server_s) / 2),
        decision_s=_at_least(decision_s),
        update_s=update_s,
        wires=wires,
    )


class _Job:
    """Measurements of a worker and a shard server.

    Args:
        world: the worker.
        server: process id of the shard server.
        sizes: the sizes of the measurements.
    """

    def __init__(self, world: World, server: int, sizes: Sizes) -> None:
        self._world = world
        self._server_clock = ~server << 3 | 2  # clock_getcpuclockid(3), which Python does not have
        self._sizes = sizes

    def decision_s(self) -> float:
        """Measure the seconds from a vote to its decision, where nothing was pushed."""
        times = []
        with self._model("decision", [self._sizes.small_numel], WirePrecision()) as model:
            for _ in range(self._sizes.repetitions):
                model.push_nothing()
                began_s = time.perf_counter()
                model.vote()
                times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    def calls(self) -> tuple[_Cost, _Cost]:
        """Measure the costs of a push and a gather of a small unit."""
        count, pushes, gathers = self._sizes.calls, [], []
        with self._model("calls", [self._sizes.small_numel] * count, WirePrecision()) as model:
            for _ in range(self._sizes.repetitions):
                pushes.append(self._cost(model.push_all))
                self._cost(model.commit)
                gathers.append(self._cost(model.gather_all))
        return _median(pushes, by=count), _median(gathers, by=count)

    def wire(self, name: str, precision: WirePrecision, push: _Cost, gather: _Cost, update_s: float) -> WireCost:
        """Measure the costs of an element that travels in some form.

        Args:
            name: name of the form.
            precision: the form.
            push: the cost of a push beside its elements.
            gather: the cost of a gather beside its elements.
            update_s: the cost by element of the optimizer of `_Model`.
        """
        numel, pushes, commits, gathers = self._sizes.large_numel, [], [], []
        with self._model(name, [numel, self._sizes.small_numel], precision) as model:
            for _ in range(self._sizes.repetitions):
                pushes.append(self._cost(lambda: model.push(0)))
                model.push(1)
                commits.append(self._cost(model.commit))
                gathers.append(self._cost(lambda: model.gather(0)))
        pushed, committed, gathered = (_median(costs, by=1) for costs in (pushes, commits, gathers))
        return WireCost(
            worker_gather_s=_at_least((gathered.worker_s - gather.worker_s) / numel),
            server_gather_s=_at_least((gathered.server_s - gather.server_s) / numel),
            worker_push_s=_at_least((pushed.worker_s - push.worker_s) / numel),
            server_push_s=_at_least((pushed.server_s - push.server_s) / numel),
            server_encode_s=_at_least((committed.server_s - gather.server_s) / numel - update_s),
        )

    @contextmanager
    def _model(self, name: str, numels: Sequence[int], precision: WirePrecision) -> Iterator[_Model]:
        """Make a model with units of so many elements, and a first step, which compiles the loops it needs."""
        model = _Model(self._world, name, numels, precision)
        model.push_all()
        model.commit()
        model.gather_all()
        yield model
        self._world.models.release(model.steps)

    def _cost(self, action: Callable[[], object]) -> _Cost:
        """Measure the costs of an action to both processes; see Note: [Processor time of another process]."""
        before = self._clocks()
        action()
        after = self._clocks()
        return _Cost(after.worker_s - before.worker_s, after.server_s - before.server_s)

    def _clocks(self) -> _Cost:
        time.sleep(_SETTLE_S)
        return _Cost(time.process_time(), time.clock_gettime(self._server_clock))


class _Model:
    """A model of the job whose units are vectors, trained with SGD.

    Args:
        world: the worker.
        name: its name in the job.
        numels: elements of each unit.
        precision: the form in which parameters and gradients travel.
    """

    def __init__(self, world: World, name: str, numels: Sequence[int], precision: WirePrecision) -> None:
        units = (build_unit(f"unit {i}", [(f"weight {i}", (n,), DType.F32)]) for i, n in enumerate(numels))
        spec = JobSpec(layout=Layout(units=tuple(units)), precision=precision)
        self.steps, registered = world.models.register(spec, name)
        random = np.random.default_rng(0)
        values: list[Array] = [random.standard_normal(n, np.float32) for n in numels]
        for unit, first in enumerate(values):
            self.steps.parameters.upload(unit, first)
        self.steps.register_optimizer(OptimizerSpec(name="sgd", groups=_HYPER, group_of=(0,) * len(numels)))
        self.steps.view.wait_initialized(registered)
        self._gradients = [v if precision.grad is DType.F32 else cast.encoded(v, precision.grad) for v in values]
        self._gathered = [np.zeros(n, precision.param.numpy) for n in numels]
        self._begin()

    def _begin(self) -> None:
        self._ticket = self.steps.ticket()
        self._pushes: list[LoopWork[None]] = []

    def push(self, unit: int) -> None:
        """Push the gradient of a unit."""
        self._push(unit, self._gradients[unit])

    def push_all(self) -> None:
        """Push the gradients of all units, one after the other."""
        for unit in range(len(self._gradients)):
            self.push(unit)

    def push_nothing(self) -> None:
        """Push, for every unit, that it has no gradient."""
        for unit in range(len(self._gradients)):
            self._push(unit, None)

    def _push(self, unit: int, gradient: Array | None) -> None:
        self._pushes.append(self.steps.gradients.push(unit, gradient, self._ticket))
        self._pushes[-1].wait(_TIMEOUT_S)

    def vote(self) -> None:
        """Vote, and wait for the decision."""
        self.steps.vote(self._ticket, self._pushes, max_norm=0.0, hyper=_HYPER)
        self._begin()

    def commit(self) -> None:
        """Vote, and wait until the servers have the new version: they update units in order."""
        self.vote()
        self.gather(len(self._gathered) - 1)

    def gather(self, unit: int) -> None:
        """Gather a unit at the newest version."""
        self.steps.parameters.gather(unit, self._gathered[unit]).wait(_TIMEOUT_S)

    def gather_all(self) -> None:
        """Gather all units, one after the other."""
        for unit in range(len(self._gathered)):
            self.gather(unit)


def _update_s(name: str, sizes: Sizes) -> float:
    """Measure an optimizer's update with its defaults, in processor seconds by element, checked as on shard servers."""
    rule, numel, times = create(name), sizes.large_numel, []
    hyper = rule.validate({})
    param, grad = (np.full(numel, value, np.float32) for value in (1.0, 1e-3))
    state = tuple(np.full(numel, rule.initial_state(s, (hyper,)), np.float32) for s in rule.state_names((hyper,)))
    digests = np.zeros((2, 2 + len(state)), np.uint64)
    for update in range(1, sizes.repetitions + 2):  # the first one compiles
        began_s = time.thread_time()
        rule.apply(param, grad, state, None, DType.F32, hyper, update, 1.0, digests)
        times.append(time.thread_time() - began_s)
    return _at_least(statistics.median(times[1:]) / numel)


def _median(costs: Sequence[_Cost], *, by: int) -> _Cost:
    """Return the medians, divided by a count."""
    return _Cost(
        statistics.median(cost.worker_s for cost in costs) / by, statistics.median(cost.server_s for cost in costs) / by
    )


def _at_least(measured_s: float) -> float:
    return max(FLOOR_S, measured_s)


def _described(cost: _Cost, factor: float, unit: str) -> str:
    return f"worker {cost.worker_s * factor:.0f} {unit}, server {cost.server_s * factor:.0f} {unit}"


def print_profile(profile: Profile) -> None:
    """Print a profile as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    elements = Table(box=None, pad_edge=False, title="ns of processor time by element", title_justify="left")
    elements.add_column("")
    for heading in ("worker gather", "worker push", "server gather", "server push", "server encode"):
        elements.add_column(heading, justify="right")
    for name, w in profile.wires.items():
        costs = (w.worker_gather_s, w.worker_push_s, w.server_gather_s, w.server_push_s, w.server_encode_s)
        elements.add_row(name, *(f"{cost * 1e9:.2f}" for cost in costs))
    others = Table(box=None, pad_edge=False, show_header=False)
    others.add_column()
    others.add_column(justify="right")
    for name, cost in profile.update_s.items():
        others.add_row(f"update by the server, {name}", f"{cost * 1e9:.2f} ns an element")
    others.add_row("a gather or push beside its elements, worker", f"{profile.worker_call_s * 1e6:.0f} µs")
    others.add_row("a gather or push beside its elements, server", f"{profile.server_call_s * 1e6:.0f} µs")
    others.add_row("from a vote to its decision", f"{profile.decision_s * 1e3:.2f} ms")
    others.add_row("processors", str(profile.cores))
    for table in (elements, others):
        console.print(table)


def run(path: Path, *, as_json: bool) -> None:
    """Write a profile of this machine; lines on standard error show what has been measured."""
    from rich.console import Console

    check_target(path)
    profile = measure(Sizes(), Console(stderr=True, highlight=False).print)
    write(profile, path)
    if as_json:
        print(json.dumps(profile.as_dict(), indent=2))
    else:
        print_profile(profile)
