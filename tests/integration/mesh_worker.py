"""A worker of a mesh 2 x 2: two replicas, the workers of each with other units of one model."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import axon_ps
from axon_ps.errors import AxonError
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.types import Array, DType, Grouping, OptimizerSpec, Outcome
from axon_ps.worker.models import Models
from axon_ps.worker.steps.client import StepClient
from axon_ps.worker.steps.ticket import Ticket
from axon_ps.worker.world import World

ROWS = ((0, 1), (2, 3))
SHAPES = {"a": (700,), "b": (40, 30), "shared": (9,)}
PART_OF = {"a": 0, "b": 1, "shared": 0}
LR, MAX_NORM = 0.5, 1.9
LAYOUT = Layout(units=tuple(build_unit(name, [(f"{name}.weight", shape, DType.F32)]) for name, shape in SHAPES.items()))
SPEC = JobSpec(
    layout=LAYOUT, options=PlanOptions(chunk_numel=128, min_slice_numel=64), grouping=Grouping(rows=ROWS), model="Mesh"
)
OPTIMIZER = OptimizerSpec(
    name="sgd",
    groups=({"lr": LR, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0},),
    group_of=(0, 0, 0),
)


def first_values(unit: int) -> Array:
    return np.random.default_rng(unit).standard_normal(LAYOUT.units[unit].numel).astype(np.float32)


def gradient(unit: int, version: int, row: int) -> Array:
    """f32[unit_numel], of one replica in the step to `version`."""
    made = np.random.default_rng((unit, version, row)).standard_normal(LAYOUT.units[unit].numel)
    return (made / 16).astype(np.float32)


@dataclass
class Steps:
    """The steps that a worker has seen.

    Attributes:
        replicas: per version that was committed with its vote, the number of replicas.
        norms: likewise the norms.
        values: of its units, at the end.
        aborts: steps that did not commit.
        error: what ended it.
    """

    replicas: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)
    aborts: int = 0
    error: str = ""


def steps_of(world: World, part: int) -> StepClient:
    """Register the model, and upload the units of this part if that is asked for."""
    models: Models = world.models
    while True:
        client, reply = models.register(SPEC)
        if reply.upload:
            for unit, meta in enumerate(LAYOUT.units):
                if PART_OF[meta.name] == part:
                    client.parameters.upload(unit, first_values(unit))
        if reply.initialized or client.view.wait_initialized(reply):
            client.register_optimizer(OPTIMIZER)
            return client


def step(client: StepClient, ticket: Ticket, part: int, row: int) -> tuple[Outcome, int, float]:
    """Push this worker's units, and vote: (outcome, version, norm)."""
    mine = [unit for unit, meta in enumerate(LAYOUT.units) if PART_OF[meta.name] == part]
    version, kept = client.view.version + 1, []
    pushes = []
    for unit in mine if not ticket.is_void else ():
        kept.append(gradient(unit, version, row) / np.float32(ticket.num_replicas))
        pushes.append(client.gradients.push(unit, kept[-1], ticket))
    others = [unit for unit in range(len(LAYOUT.units)) if unit not in mine]  # one parameter each
    decision = client.vote(ticket, pushes, max_norm=MAX_NORM, hyper=(), untouched=others)
    return decision.outcome, decision.version, decision.grad_norm


def train(last: int, dies: tuple[int, int], alone_until: int, notes: Path, timeout_s: float) -> Steps:
    """Train to version `last`.

    Args:
        last: the version.
        dies: (rank, version) of a worker that is killed before its vote for the next; once.
        alone_until: the last version that one replica makes alone; then it waits for the other.
        notes: a folder in which the dead worker leaves a file.
        timeout_s: of all waits.
    """
    seen, died = Steps(), notes / "died"
    with axon_ps.World.init(timeout_s=timeout_s, join_timeout_s=120.0) as world:
        row = next(i for i, ranks in enumerate(ROWS) if world.rank in ranks)
        part = ROWS[row].index(world.rank)
        client = steps_of(world, part)
        try:
            while client.view.version < last:
                ticket = client.ticket()
                if (world.rank, client.view.version) == dies and not died.exists():
                    died.write_text("")
                    os.kill(os.getpid(), signal.SIGKILL)
                outcome, version, norm = step(client, ticket, part, row)
                if outcome is not Outcome.COMMIT:
                    seen.aborts += 1
                    world.view.wait_complete()
                    continue
                seen.replicas[version], seen.norms[version] = ticket.num_replicas, norm
                while version == alone_until and world.num_replicas < len(ROWS):
                    time.sleep(0.01)
            for unit, meta in enumerate(LAYOUT.units):
                out = np.empty(meta.numel, np.float32)
                client.parameters.gather(unit, out).wait(timeout_s)
                seen.values[unit] = out
        except AxonError as error:
            seen.error = f"{type(error).__name__}: {error}"
    return seen


def expected(replicas: dict[int, int]) -> tuple[dict[int, float], dict[int, Array]]:
    """Norms and values after SGD with momentum, given the number of replicas of each version: the first rows."""
    units = range(len(LAYOUT.units))
    values = {unit: first_values(unit).astype(np.float64) for unit in units}
    moments = {unit: np.zeros_like(values[unit]) for unit in units}
    norms = {}
    for version, count in sorted(replicas.items()):
        means = {u: np.mean([gradient(u, version, row).astype(np.float64) for row in range(count)], 0) for u in units}
        norms[version] = math.sqrt(sum(float(np.sum(mean**2)) for mean in means.values()))
        for unit, mean in means.items():
            moments[unit] = 0.9 * moments[unit] + mean * min(1.0, MAX_NORM / norms[version])
            values[unit] -= LR * moments[unit]
    return norms, {unit: value.astype(np.float32) for unit, value in values.items()}
