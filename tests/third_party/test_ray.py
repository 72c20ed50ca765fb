"""`axon_ps.ray` on four real Ray nodes: actors are killed, a node is taken away while training; the oracle is gloo.

The nodes are raylets of this machine, each with its own workers and object store. The head has no CPU to give, so that
shard servers and workers are on the other three.

Tests of `ray/placement.py`, `ray/service.py`, `ray/services.py`, `ray/train.py` and `ray/workers.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.nn.functional as F
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.utils.data import TensorDataset

import axon_ps
from axon_ps.errors import Broken, Busy, ConfigurationError, Misuse
from axon_ps.parallel import FSDP, SGD, ElasticLoader
from axon_ps.ray import AxonConfig, AxonTrainer, ClusterConfig, RayCluster

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of which there are many

NODE = {"num_cpus": 3, "object_store_memory": 80 << 20}
QUICK = {  # a raylet that was killed is noticed after 2 s; Ray's default is 15 s
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
STEPS, SAMPLES, AT_STEP, UNTIL = 120, 24, 20, 100


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    """Four Ray nodes, which end with the module and leave nothing."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a module of pytest's
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    me = psutil.Process()
    before = set(me.children(recursive=True))
    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            cluster.add_node(**NODE, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
    _, left = psutil.wait_procs(set(me.children(recursive=True)) - before, timeout=20)
    assert not left, f"Ray's processes are left: {left}"


@pytest.fixture(autouse=True)
def nothing_left_behind(nodes: Cluster) -> Iterator[None]:
    """After each test no actor of ours lives, and nothing is reserved. (Ray's own processes stay for the next one.)"""
    yield
    deadline = threading.Event()
    for _ in range(400):
        if not (left := [*ours(), *reserved()]):
            return
        deadline.wait(0.1)  # Ray ends the actors of a controller that has ended
    raise AssertionError(f"actors or reservations are left: {left}")


def ours() -> list[psutil.Process]:
    """Processes of actors of ours, by the titles that Ray gives them."""
    return [p for kind in ("ShardActor", "CoordinatorActor", "WorkerActor", "Release") for p in processes(kind)]


def reserved() -> list[dict[str, Any]]:
    """Placement groups that there are."""
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def processes(kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith(f"ray::{kind}"):
            found.append(process)
    return found


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "ray")


@ray.remote(num_cpus=0)
class Signal:
    """Events by name, between the workers and the test; and the steps that each worker has made."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._made: dict[int, list[int]] = {}

    async def made(self, rank: int, version: int) -> None:
        self._made.setdefault(rank, []).append(version)

    async def versions(self) -> dict[int, list[int]]:
        return self._made

    async def set(self, name: str) -> None:
        self._events.setdefault(name, asyncio.Event()).set()

    async def wait(self, name: str) -> None:
        async with asyncio.timeout(120):
            await self._events.setdefault(name, asyncio.Event()).wait()


# ---------------------------------------------------------------------- what is trained


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """x f32[480, 8] and y f32[480, 1]."""
    x = torch.randn(20 * SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, (x * torch.arange(8.0) / 12.0).sum(1, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of_all(model: nn.Module) -> float:
    with torch.no_grad():
        x, y = data()
        return F.mse_loss(model(x), y).item()


def elastic(options: dict[str, Any]) -> float:
    """Trains on the servers; a step's samples are the same however many workers there are."""
    world = axon_ps.World.init()
    model = FSDP(network(), world.default_group)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = ElasticLoader(TensorDataset(*data()), model, batch_size=SAMPLES, shuffle=False)
    for _ in loader.epochs(STEPS * SAMPLES // len(data()[0])):
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            if result.committed:
                options["events"].made.remote(world.rank, result.version)
            disturbed(options, result.version)
    return loss_of_all(model)


def disturbed(options: dict[str, Any], version: int) -> None:
    """Let the test do its worst between two steps of the run: not before, and not when training is over."""
    if (events := options.get("events")) is not None:
        if version == AT_STEP:
            ray.get(events.set.remote("training"))
        if version == UNTIL:
            ray.get(events.wait.remote("disturbed"))


def over_gloo(options: dict[str, Any]) -> list[float]:
    """The same steps by Ray's and torch's own means."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    losses = []
    for step in range(STEPS):
        mine = torch.arange(SAMPLES)[rank::size] + step * SAMPLES % len(x)
        optimizer.zero_grad()
        F.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        losses.append(loss_of_all(model.module))
        disturbed(options, step + 1)
    return losses


def trainer(kind: type[TorchTrainer], function: Callable[..., Any], storage: str, **options: Any) -> TorchTrainer:
    return kind(
        function,
        scaling_config=ScalingConfig(num_workers=3, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=4)),
        **options,
    )


@pytest.fixture(scope="module")
def losses_of_gloo(tmp_path_factory: pytest.TempPathFactory, nodes: Cluster) -> list[float]:
    """After every step, by DDP over gloo under Ray Train."""
    storage = str(tmp_path_factory.mktemp("gloo"))
    gloo = trainer(TorchTrainer, over_gloo, storage, train_loop_config={}, torch_config=TorchConfig(backend="gloo"))
    result: list[float] = gloo.fit().return_value
    assert len(result) == STEPS
    return result


def while_training(train: Callable[[Any], Any], do: Callable[[], None]) -> tuple[Any, dict[int, list[int]]]:
    """What `train` returns, and the steps of each worker; meanwhile, when it is at some step, `do` happens."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    events = Signal.options(scheduling_strategy=here).remote()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, events)
        try:
            ray.get(events.wait.remote("training"), timeout=120)
            do()
        finally:
            events.set.remote("disturbed")
        result = training.result(timeout=200)
    versions = ray.get(events.versions.remote(), timeout=10)
    ray.kill(events)
    return result, versions


def remove_a_node(nodes: Cluster) -> Callable[[], None]:
    """Kill the raylet that has a shard server and a worker; its processes die with it. Another node comes."""

    def remove() -> None:
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        nodes.add_node(**NODE, wait=False)

    return remove


def kill_one(*kinds: str) -> Callable[[], None]:
    def kill() -> None:
        for kind in kinds:
            os.kill(processes(kind)[0].pid, signal.SIGKILL)

    return kill


# ---------------------------------------------------------------------- RayCluster


def assert_no_step_was_lost(versions: dict[int, list[int]]) -> None:
    """Two survivors have made every step once, in order; the one that came back has made none of its steps again."""
    every = list(range(1, STEPS + 1))
    assert [made == every for made in versions.values()].count(True) >= 2
    assert all(made == sorted(set(made)) for made in versions.values())


def test_a_node_with_a_shard_server_and_a_worker_is_removed_while_training(
    nodes: Cluster, losses_of_gloo: list[float]
) -> None:
    with RayCluster(3, ClusterConfig(shards=3)) as cluster:
        membership = cluster.status().membership
        assert len({shard.node for shard in membership.shards}) == 3
        losses, versions = while_training(lambda events: cluster.run(elastic, {"events": events}), remove_a_node(nodes))
        assert cluster.status().counters["losses"] >= 2
    assert_no_step_was_lost(versions)
    assert losses == pytest.approx([losses_of_gloo[-1]] * 3, rel=1e-6, abs=1e-6)


def test_a_shard_server_a_worker_and_the_coordinator_are_killed(losses_of_gloo: list[float]) -> None:
    with RayCluster(3, ClusterConfig(shards=3)) as cluster:
        killed = kill_one("ShardActor", "WorkerActor", "CoordinatorActor")
        losses, versions = while_training(lambda events: cluster.run(elastic, {"events": events}), killed)
    assert_no_step_was_lost(versions)
    assert losses == pytest.approx([losses_of_gloo[-1]] * 3, rel=1e-6, abs=1e-6)


def test_two_clusters_at_once_on_a_ray_that_was_initialized_before() -> None:
    def rank() -> tuple[int, float]:
        with axon_ps.World.init() as world:
            return world.rank, float(axon_ps.all_reduce_sum(torch.ones(1))[0])

    with RayCluster(2, ClusterConfig(shards=1)) as one, RayCluster(1, ClusterConfig(shards=2)) as other:
        one.start(rank)
        assert other.run(rank) == [(0, 1.0)]
        assert one.results() == [(0, 2.0), (1, 2.0)]
        assert one.run(lambda: os.environ["AXON_PS_JOB"])[0] == one.services.config.job
    assert ray.is_initialized()


def test_what_a_worker_raises_ends_the_run_with_its_traceback() -> None:
    def fails() -> None:
        world = axon_ps.World.init()
        if world.rank == 1:
            raise ValueError("no data here")
        world.barrier("never")

    with RayCluster(2) as cluster:
        with pytest.raises(Broken, match="worker 1 raised ValueError(.|\n)*no data here"):
            cluster.run(fails)
        assert cluster.run(os.getpid)  # the services are there still


def test_what_cannot_be_placed_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(Busy, match=r"could not place the shard servers within 1 s.*5 of \{CPU: 1\} by STRICT_SPREAD"):
        RayCluster(1, ClusterConfig(shards=5, placement="STRICT_SPREAD", start_timeout_s=1)).__enter__()
    with pytest.raises(Busy, match="could not place the workers"):
        RayCluster(99, ClusterConfig(start_timeout_s=1)).__enter__()
    assert not reserved()


def test_a_service_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigurationError, match="no_such_module"):
        RayCluster(1, ClusterConfig(plugins=("no_such_module",))).__enter__()


def test_it_is_used_in_order() -> None:
    cluster = RayCluster()
    with pytest.raises(Misuse, match="not running"):
        cluster.start(os.getpid)
    with pytest.raises(ConfigurationError, match="workers is 0"):
        RayCluster(0)


# ---------------------------------------------------------------------- Ray Train


def test_ray_trains_own_example_gives_the_losses_of_gloo(storage: str) -> None:
    def example(config: dict[str, Any]) -> Any:
        from ray.train.examples.pytorch.torch_linear_example import train_func

        torch.manual_seed(0)
        return train_func(config)

    def losses(config: TorchConfig) -> list[float]:
        options = {"lr": 1e-2, "batch_size": 4, "epochs": 2, "data_size": 120, "val_size": 40}
        fitted = trainer(TorchTrainer, example, storage, train_loop_config=options, torch_config=config).fit()
        return [epoch["loss"] for epoch in fitted.return_value]

    over_axon, oracle = losses(AxonConfig()), losses(TorchConfig(backend="gloo"))
    assert over_axon == pytest.approx(oracle, rel=1e-6, abs=1e-6)
    assert oracle[-1] < oracle[0]


def test_ray_train_goes_on_by_itself_when_a_worker_and_a_shard_server_are_killed(
    storage: str, losses_of_gloo: list[float]
) -> None:
    """Over the process group: Ray Train restarts all workers, in the same job on the same servers."""

    def train(events: Any) -> Any:
        options = {"events": events}
        return trainer(TorchTrainer, over_gloo, storage, train_loop_config=options, torch_config=AxonConfig()).fit()

    result, _ = while_training(train, kill_one("ShardActor", "RayTrainWorker"))
    assert result.return_value == pytest.approx(losses_of_gloo, rel=1e-6, abs=1e-6)


def elastically(storage: str) -> Callable[[Any], Any]:
    config = AxonConfig(elastic=True, cluster=ClusterConfig(shards=3))
    return lambda events: trainer(
        AxonTrainer, elastic, storage, train_loop_config={"events": events}, axon_config=config
    ).fit()


def test_an_elastic_trainer_loses_a_node_and_no_step(nodes: Cluster, storage: str, losses_of_gloo: list[float]) -> None:
    result, versions = while_training(elastically(storage), remove_a_node(nodes))
    assert_no_step_was_lost(versions)
    assert result.return_value == pytest.approx(losses_of_gloo[-1], rel=1e-6, abs=1e-6)
