"""Several models in one job, by name: equal to the same models trained by torch in one process."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import errors, parallel
from axon_ps.testing import LocalCluster

STEPS = 3
BATCH = 4


def mlp(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def generator() -> nn.Module:
    return mlp(1, 3, 6, 4)


def discriminator() -> nn.Module:
    return mlp(2, 4, 10, 1)


def twin() -> nn.Module:
    """Laid out as the discriminator, with other values."""
    return mlp(3, 4, 10, 1)


def teacher() -> nn.Module:
    return mlp(4, 4, 5, 1).requires_grad_(False)


def average() -> nn.Module:
    """The moving average of the generator: as it begins, and never trained."""
    return generator().requires_grad_(False)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(noise, data) of one worker in one step; what one worker alone gets is that of two, together."""
    made = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(BATCH, 3, generator=made), torch.randn(BATCH, 4, generator=made)


class Job:
    """A GAN, a critic with a frozen teacher, and a moving average: in plain torch, or wrapped."""

    def __init__(self, wrap: Any = lambda module, name: module, optim: Any = torch.optim) -> None:
        self.models = {
            "generator": wrap(generator(), "generator"),
            "discriminator": wrap(discriminator(), "discriminator"),
            "critic": wrap(twin(), "critic"),
            "teacher": wrap(teacher(), "teacher"),
            "average": wrap(average(), "average"),
        }
        self.optimizers = {
            "generator": optim.AdamW(self.models["generator"].parameters(), lr=0.01),
            "discriminator": optim.SGD(self.models["discriminator"].parameters(), lr=0.1, momentum=0.9),
            "critic": optim.SGD(self.models["critic"].parameters(), lr=0.05),
        }

    def losses(self, noise: torch.Tensor, data: torch.Tensor) -> Any:
        """Name and loss of each model in its turn."""
        g, d = self.models["generator"], self.models["discriminator"]
        with torch.no_grad():
            fake = g(noise)
        yield "discriminator", (d(fake) - d(data)).mean()
        d.requires_grad_(False)
        yield "generator", -d(g(noise)).mean()
        d.requires_grad_(True)
        with torch.no_grad():
            wanted = self.models["teacher"](data)
        yield "critic", (self.models["critic"](data) - wanted).square().mean()


def of_torch(steps: int, ranks: int = 2) -> tuple[Job, list[dict[str, Any]]]:
    """The job in one process; its values after each step."""
    job, kept = Job(), []
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(ranks)]
        for name, loss in job.losses(*(torch.cat(part) for part in zip(*batches, strict=True))):
            job.optimizers[name].zero_grad()
            loss.backward()
            job.optimizers[name].step()
        with torch.no_grad():
            for mine, other in zip(
                job.models["average"].parameters(), job.models["generator"].parameters(), strict=True
            ):
                mine.mul_(1 - 0.005).add_(other, alpha=0.005)
        kept.append({name: values(model) for name, model in job.models.items()})
    return job, kept


def values(model: Any) -> dict[str, Any]:
    return {key: value.detach().numpy().copy() for key, value in model.state_dict().items()}


def wrapped(world: axon_ps.World, strategies: dict[str, str]) -> Job:
    def wrap(module: nn.Module, name: str) -> Any:
        strategy = parallel.ShardingStrategy[strategies.get(name, "FULL_SHARD")]
        return parallel.FSDP(module, world, name=name, sharding_strategy=strategy, unit_types={nn.Linear})

    return Job(wrap, parallel)


def one_step(world: axon_ps.World, job: Job, step: int, ranks: int) -> None:
    """One turn of every model, with the batches of `ranks` workers spread over those that there are."""
    mine = [batch(rank, step) for rank in range(ranks) if rank % world.world_size == world.rank]
    for name, loss in job.losses(*(torch.cat(part) for part in zip(*mine, strict=True))):
        loss.backward()
        assert job.optimizers[name].step().committed
        job.optimizers[name].zero_grad()
    assert job.models["average"].copy_from(job.models["generator"], weight=0.005).committed


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, arrays in wanted.items():
        for key, array in arrays.items():
            np.testing.assert_allclose(found[name][key], array, rtol=2e-4, atol=2e-6, err_msg=f"{name} {key}")


def trains(uri: str, strategies: dict[str, str]) -> Any:
    """Two steps of every model in turns, a checkpoint, a third step; then back to it, and the third step again."""
    with axon_ps.World.init() as world:
        job = wrapped(world, strategies)
        for step in range(2):
            one_step(world, job, step, 2)
        job.models["generator"].save_checkpoint(uri)
        one_step(world, job, 2, 2)
        third = {name: values(model) for name, model in job.models.items()}
        world.barrier("third")
        if world.rank == 0:
            info = world.restore_checkpoint(uri)
            assert info.versions == {"generator": 2, "discriminator": 2, "critic": 2, "teacher": 0, "average": 2}
        for model in job.models.values():
            model.runtime._client.view.wait_epoch(1)
        back = {name: values(model) for name, model in job.models.items()}
        one_step(world, job, 2, 2)
        again = {name: values(model) for name, model in job.models.items()}
        with pytest.raises(errors.Misuse, match=r"the job has several models \('generator', 'disc"):
            _ = world.version
        with pytest.raises(errors.InvalidRequest, match=r"cannot take the values of 'critic'"):
            job.models["average"].copy_from(job.models["critic"])
        with pytest.raises(errors.Misuse, match=r"cannot be wrapped as 'critic'.*has wrapped Sequential \(61"):
            parallel.FSDP(twin(), world, name="critic")
        before = world.server_statistics(0)["master_bytes"]
        job.models["teacher"].release()
        with pytest.raises(errors.Misuse, match="model 'teacher' was released"):
            job.models["teacher"](torch.zeros(1, 4))
        world.barrier("released")
        end = time.monotonic() + 20.0  # the server has it from the coordinator on a session of its own
        while not (freed := before - world.server_statistics(0)["master_bytes"]) and time.monotonic() < end:
            pass
        world.barrier("weighed")  # before the other worker makes another
        made = parallel.FSDP(twin(), world, name="teacher")
        made.load_state_dict(discriminator().state_dict())
        versions = {name: model.version for name, model in job.models.items() if name != "teacher"}
        return third, back, again, versions, freed, values(made)


MIXED = {"discriminator": "SHARD_GRAD_OP", "critic": "HYBRID_SHARD", "average": "SHARD_GRAD_OP"}


def goes_on(uri: str) -> Any:
    """At another world size: everything from the checkpoint, and the third step."""
    with axon_ps.World.init() as world:
        job = wrapped(world, {})
        world.resume_checkpoint(uri)
        one_step(world, job, 2, 2)
        return {name: values(model) for name, model in job.models.items()}, world.server_statistics(0)


def test_five_models_in_turns_equal_torch_through_checkpoints_at_any_world_size(tmp_path: Path) -> None:
    _, wanted = of_torch(3)
    with LocalCluster(shards=2, world_size=2, lease_s=30.0) as cluster:
        results = [r.value for r in cluster.run_workers(trains, args=(str(tmp_path), MIXED))]
    for third, back, again, versions, freed, fresh in results:
        same(third, wanted[2])
        same(back, wanted[1])
        same(again, wanted[2])
        assert versions == {"generator": 3, "discriminator": 3, "critic": 3, "average": 3}
        assert freed > 0
        same({"": fresh}, {"": values(discriminator())})
    with LocalCluster(shards=1, world_size=1, lease_s=30.0) as cluster:
        ((found, statistics),) = [r.value for r in cluster.run_workers(goes_on, args=(str(tmp_path),))]
    same(found, wanted[2])
    assert statistics["model/critic/version"] == 3
    assert sum(v for k, v in statistics.items() if k.endswith("/master_bytes")) == statistics["master_bytes"]


def dies() -> Any:
    """Worker 2 dies in the middle of the critic's second step; the others go on, wherever they were."""
    with axon_ps.World.init() as world:
        models = [
            parallel.FSDP(module, world, name=name) for module, name in ((twin(), "first"), (discriminator(), "second"))
        ]
        optimizers = [parallel.SGD(model, lr=0.1) for model in models]
        average = parallel.FSDP(twin().requires_grad_(False), world)
        data, committed = torch.ones(2, 4), []
        while models[0].version < 4:
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                model(data).square().mean().backward()
                if world.rank == 2 and model.version == 1 and number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                committed.append((model.name, optimizer.step().committed))
                optimizer.zero_grad()
            committed.append(("average", average.copy_from(models[0], 0.5).committed))
        return committed, [model.version for model in (*models, average)], [values(m) for m in (*models, average)]


def test_a_death_in_the_middle_of_one_models_step_hurts_no_version_of_any() -> None:
    with LocalCluster(shards=1, world_size=3, min_workers=2, lease_s=30.0) as cluster:
        results = [r.value for r in cluster.run_workers(dies, check=False) if r.rank != 2]
    models = [twin(), discriminator(), twin()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    committed, versions, _ = results[0]
    assert len([1 for _, ok in committed if not ok]) >= 1
    for name, _ in (each for each in committed if each[1]):
        number = ("first", "second", "average").index(name)
        if name == "average":
            with torch.no_grad():
                for mine, other in zip(models[2].parameters(), models[0].parameters(), strict=True):
                    mine.mul_(0.5).add_(other, alpha=0.5)
            continue
        optimizers[number].zero_grad()
        models[number](torch.ones(2, 4)).square().mean().backward()
        optimizers[number].step()
    assert versions[0] == 4
    for each in results:
        assert [c for c in each[0] if c[1]] == [c for c in committed if c[1]]
        assert each[1] == versions
        same(dict(enumerate(each[2])), {n: values(model) for n, model in enumerate(models)})


def orders() -> Any:
    """Two models in threads of their own, steps of both under way at once; made in another order on each worker."""
    with axon_ps.World.init() as world:
        made, found = {}, {}
        names = ("first", "second") if world.rank else ("second", "first")
        for name in names:
            module = twin() if name == "first" else generator()
            made[name] = parallel.FSDP(module, world, name=name)

        def train(name: str, width: int) -> None:
            optimizer = parallel.SGD(made[name], lr=0.1)
            for _ in range(STEPS):
                made[name](torch.ones(2, width)).square().mean().backward()
                assert optimizer.step().committed
                optimizer.zero_grad()

        def guarded(name: str, width: int) -> None:
            try:
                train(name, width)
            except BaseException as error:
                found[name] = repr(error)

        threads = [threading.Thread(target=guarded, args=each) for each in (("first", 4), ("second", 3))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not found
        try:
            parallel.FSDP(mlp(9, 4, 5, 1) if world.rank else mlp(9, 4, 6, 1), world, name="third")
        except errors.LayoutMismatch as error:
            found["third"] = str(error)
        world.barrier("done")
        return {name: values(model) for name, model in made.items()}, found


def test_steps_of_two_models_are_under_way_at_once_whatever_the_order_they_were_made_in() -> None:
    with LocalCluster(shards=1, world_size=2, lease_s=30.0) as cluster:
        results = [r.value for r in cluster.run_workers(orders)]
    wanted = {}
    for name, module, width in (("first", twin(), 4), ("second", generator(), 3)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            module(torch.ones(2, width)).square().mean().backward()
            optimizer.step()
        wanted[name] = values(module)
    for found, _ in results:
        same(found, wanted)
    (refused,) = [why["third"] for _, why in results if why]
    assert "registers another model as 'third' than the job has" in refused
