"""DiLoCo and local SGD on shard servers equal a simulation of the same algorithms in plain torch, in one process.

One job of three workers goes through everything: outer steps of three, two and one, attempts that a leaver aborts, a
joiner, a worker that diverges, a checkpoint that is restored. After each outer step the values are the simulation's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from parity_model import Block, Values, batch, build

INNER = 3
OPTIONS = PlanOptions(chunk_numel=512, min_slice_numel=128)

Log = list[tuple[bool, Values]]
"""After each outer step of a worker: whether it committed, and the worker's values."""


def values_of(module: nn.Module) -> Values:
    return {name: value.numpy().copy() for name, value in module.state_dict().items()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With a larger eps than torch's default, which would amplify the rounding of gradients near zero."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)


def inner_steps(model: nn.Module, optimizer: Any, round_: int, rank: int, step: Any) -> Any:
    """The inner steps of one round, on data of their own; what the last `step()` gave."""
    result = None
    for i in range(INNER):
        model(batch(round_ * INNER + i, rank)).backward()
        result = step()
        optimizer.zero_grad()
    return result


class Simulated:
    """Douillard et al. 2023, algorithm 1, in one process."""

    def __init__(self, ranks: list[int]) -> None:
        self.shared = build()
        self.outer = torch.optim.SGD(self.shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.models: dict[int, nn.Module] = {}
        self.inner: dict[int, torch.optim.Optimizer] = {}
        self.logs: dict[int, Log] = {rank: [] for rank in ranks}
        self.trained: dict[int, int] = {}  # rounds since the last outer step
        for rank in ranks:
            self.join(rank)

    def join(self, rank: int) -> None:
        self.models[rank] = build()
        self.models[rank].load_state_dict(self.shared.state_dict())
        self.inner[rank] = adamw(self.models[rank])
        self.trained[rank] = 0

    def leave(self, rank: int) -> None:
        del self.models[rank], self.inner[rank]

    def round(self, number: int, *, commits: bool = True) -> None:
        """Everybody's inner steps, then the outer one if it commits."""
        for rank, model in self.models.items():
            inner_steps(model, self.inner[rank], number, rank, self.inner[rank].step)
            self.trained[rank] += 1
        if commits:
            with torch.no_grad():
                copies = zip(*(m.parameters() for m in self.models.values()), strict=True)
                weights = [self.trained[rank] for rank in self.models]
                for param, own in zip(self.shared.parameters(), copies, strict=True):
                    weighted = [weight * (param - copy) for weight, copy in zip(weights, own, strict=True)]
                    param.grad = torch.stack(weighted).sum(0) / sum(weights)
            self.trained = dict.fromkeys(self.models, 0)
            self.outer.step()
            for model in self.models.values():
                model.load_state_dict(self.shared.state_dict())
        self.log(commits)

    def log(self, committed: bool) -> None:
        for rank, model in self.models.items():
            self.logs[rank].append((committed, values_of(model)))


def simulate() -> dict[int, Log]:
    """What `train` does, in plain torch."""
    sim = Simulated([0, 1, 2])
    sim.round(0)
    sim.leave(2)
    sim.round(1, commits=False)
    sim.round(2)
    sim.leave(1)
    sim.round(3, commits=False)
    sim.round(4)
    saved = sim.shared.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}
    sim.join(1)
    sim.round(5)
    sim.round(6, commits=False)  # worker 1 diverges
    sim.join(1)
    sim.logs[1][-1] = (False, values_of(sim.models[1]))
    sim.round(7)
    for model in sim.models.values():
        model.load_state_dict(saved)
    sim.log(False)
    return sim.logs


def open_pipe(path: Path, mode: str) -> None:
    """Wait for the process at the other end of a named pipe."""
    with open(path, mode):
        pass


def make(world: axon_ps.World, **changes: Any) -> tuple[nn.Module, Any, Any]:
    torch.set_num_threads(1)
    model = build()
    inner = adamw(model)
    settings = {"inner_steps": INNER, "unit_types": {Block}, "plan_options": OPTIONS, **changes}
    return model, inner, parallel.DiLoCo(model, inner, world.default_group, **settings)


def train(directory: Path) -> dict[str, Any]:
    """One worker's life; see `simulate`."""
    log: Log = []
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        rank = world.rank
        made = make(world) if rank == 0 else None
        world.barrier("registered")
        refused = []
        for changes in () if made else ({"inner_steps": 0}, {"inner_steps": 4}, {"outer_lr": 0.5}):
            with pytest.raises((InvalidRequest, LayoutMismatch)) as error:
                make(world, **changes)
            refused.append(str(error.value))
        model, inner, diloco = made or make(world)
        tell_when_pushing(world)

        def outer(round_: int, last: Any = None) -> None:
            result = inner_steps(model, inner, round_, rank, last or diloco.step)
            log.append((result.committed, values_of(model)))

        world.barrier("begin")
        outer(0)
        if rank == 2:
            leave_while_others_push(world, [0, 1], 1)
            return {"log": log, "refused": refused}
        outer(1)
        outer(2)
        if rank == 1:
            leave_while_others_push(world, [0], 3)
        else:
            outer(3)
            outer(4)
            world.save_checkpoint(str(directory / "checkpoint"))
            with diloco.synced_parameters() as synced:
                assert all(np.array_equal(v, values_of(synced)[n]) for n, v in log[-1][1].items())
            open_pipe(directory / "alone", "ab")
            world.kv_wait("joined")
            return together(world, model, inner, diloco, log, directory) | {"refused": refused}
    open_pipe(directory / "alone", "rb")
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model, inner, diloco = make(world)
        world.kv_put("joined", b"yes")
        return together(world, model, inner, diloco, log, directory) | {"refused": refused}


def together(world: axon_ps.World, model: Any, inner: Any, diloco: Any, log: Log, directory: Path) -> dict[str, Any]:
    """The rounds of workers 0 and 1 after the second has come back."""
    for round_ in (5, 6, 7):
        if round_ == 6 and world.rank == 1:
            inner_steps(model, inner, round_, 1, inner.step)
            with torch.no_grad():
                model.position.fill_(float("nan"))
            result = diloco.outer_step()
            assert not inner.state
            assert "not finite" in result.reason
        else:
            result = inner_steps(model, inner, round_, world.rank, diloco.step)
        log.append((result.committed, values_of(model)))
    result = step_after_restore(world, model, diloco, directory)
    assert "the job went from version 5 to 3 without this worker" in result.reason
    log.append((result.committed, values_of(model)))
    world.barrier("done")
    return {"log": log, "statistics": diloco.statistics()}


def step_after_restore(world: axon_ps.World, model: Any, diloco: Any, directory: Path) -> Any:
    """Restore the checkpoint, and take a step: what that gave."""
    world.barrier("trained")
    if world.rank == 0:
        world.restore_checkpoint(str(directory / "checkpoint"))
    world.barrier("restored")
    model(batch(0, world.rank)).backward()
    return diloco.step()


def tell_when_pushing(world: axon_ps.World) -> None:
    """Put a key when an outer step has begun, after which a leaver aborts it for sure."""
    ticket, count = world.steps.ticket, iter(range(100))

    def told(*began: Any) -> Any:
        taken = ticket(*began)
        world.kv_put(f"pushing/{world.rank}/{next(count)}", b"yes")
        return taken

    world.steps.ticket = told  # type: ignore[method-assign]


def leave_while_others_push(world: axon_ps.World, ranks: list[int], round_: int) -> None:
    for rank in ranks:
        world.kv_wait(f"pushing/{rank}/{round_}")


def test_diloco_equals_a_simulation_in_plain_torch_whoever_comes_and_goes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alone")
    with LocalCluster(shards=2, world_size=3, min_workers=1) as cluster:
        results = [r.value for r in cluster.run_workers(train, args=(tmp_path,))]
    for rank, expected in simulate().items():
        got = results[rank]["log"]
        assert [committed for committed, _ in got] == [committed for committed, _ in expected]
        for number, ((_, values), (_, theirs)) in enumerate(zip(got, expected, strict=True)):
            for name, value in theirs.items():
                what = f"{name} of worker {rank} after its outer step {number}"
                np.testing.assert_allclose(values[name], value, rtol=1e-6, atol=1e-6, err_msg=what)
    for result in results[1:]:
        assert "inner_steps is 0" in result["refused"][0]
        assert (
            "policy is LocalSteps(inner_steps=4) here and LocalSteps(inner_steps=3) in the job" in result["refused"][1]
        )
        assert "lr is 0.5 here and 0.7 in the job" in result["refused"][2]
    numel = sum(p.numel() for p in build().parameters())
    statistics = results[1]["statistics"]  # of the joiner: pulls of a whole model, pushes of a whole model
    assert statistics["anchor_bytes"] == 4 * numel
    assert statistics["wire_bytes_in"] == (1 + 2 + 1) * 4 * numel  # at its start, two commits, one restore
    assert statistics["wire_bytes_out"] == 3 * 4 * numel  # three attempts, nine inner steps
    assert statistics["inner_steps"] == 2 * INNER
