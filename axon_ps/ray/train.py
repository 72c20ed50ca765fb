"""Ray Train over axon_ps: `AxonConfig`, a backend of its `TorchTrainer`, and `AxonTrainer`, which needs no restart.

Ray Train's controller, an actor, starts the services before the first worker group and holds them until the run ends:
they outlive every worker group, so parameters stay on the servers when Ray Train restarts workers.

`AxonConfig.elastic` selects one of two modes:
- a process group "axon" on all workers, as Ray's own backend makes one of gloo or NCCL. One worker's death breaks it,
  so Ray Train restarts all workers.
- elastic: every worker is a replica group of Ray Train's, which replaces a dead one alone. The others go on in
  `World`'s job.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.torch.config import TorchConfig, _TorchBackend
from ray.util.placement_group import PlacementGroup

from axon_ps.errors import Busy, ConfigurationError
from axon_ps.ray.config import ClusterConfig
from axon_ps.ray.services import Services
from axon_ps.ray.workers import leaving, set_environment

BACKEND = "axon"
PREPARE_S = 120.0
_logger = logging.getLogger(__name__)


@dataclass
class AxonConfig(TorchConfig):
    """A backend of Ray Train: `TorchTrainer(train, torch_config=AxonConfig(), scaling_config=...)`.

    Attributes:
        backend: torch.distributed's backend, "axon".
        init_method: as `TorchConfig` has it.
        timeout_s: as `TorchConfig` has it.
        cluster: coordinator and shard servers, which Ray places beside the workers.
        elastic: make no process group: the training function calls `World.init()`, and Ray Train replaces a lost
            worker while the others train on. It needs Ray 2.60, and `FailureConfig(max_failures=...)` above 0.
    """

    backend: str | None = BACKEND
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    elastic: bool = False

    @property
    def backend_cls(self) -> type[AxonBackend]:
        """The class of the object that Ray Train makes in its controller."""
        return ElasticAxonBackend if self.elastic else AxonBackend

    @property
    def train_func_context(self) -> Any:
        """The context around the training function, in each worker."""
        context = super().train_func_context
        return context if not self.elastic else lambda: _ElasticContext(context())


class AxonTrainer(TorchTrainer):
    """Ray's `TorchTrainer` for a function whose parameters are on shard servers: `World.init()`, `FSDP`.

    Args:
        train_loop_per_worker: the training function. A worker that replaces a lost one calls it from its first line,
            so it begins at `world.version`.
        axon_config: None = elastic, with two shard servers.
        options: as `TorchTrainer` has them.

    Raises:
        ConfigurationError: the version of Ray cannot do this.
    """

    def __init__(self, train_loop_per_worker: Any, *, axon_config: AxonConfig | None = None, **options: Any) -> None:
        config = axon_config or AxonConfig(elastic=True)
        super().__init__(train_loop_per_worker, torch_config=config, **options)
        if config.elastic:
            _check_elastic(self.run_config.failure_config)


class AxonBackend(_TorchBackend):
    """Starts the services, lets every worker find them, and makes the process group.

    Ray Train makes one instance per controller, that is, per run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._services: Services | None = None

    def on_start(self, worker_group: Any, backend_config: AxonConfig) -> None:
        """Prepare all workers. If Ray Train has replaced some, prepare only these."""
        if self._services is None:
            self._services = Services(backend_config.cluster)
        self._prepare_all(worker_group, self._services, elastic=backend_config.elastic)
        if not backend_config.elastic:
            super().on_start(worker_group, backend_config)

    def _prepare_all(self, worker_group: Any, services: Services, *, elastic: bool) -> None:
        workers = worker_group.get_workers()
        if not all(getattr(worker, "distributed_context", None) for worker in workers):
            raise ConfigurationError("axon_ps.ray needs Ray Train's API v2; unset RAY_TRAIN_V2_ENABLED=0")
        calls = []
        for index, worker in enumerate(workers):
            environment = services.environment(worker.metadata.node_id)
            if elastic:
                context = worker.distributed_context
                environment |= {"RANK": str(context.world_rank), "WORLD_SIZE": str(context.world_size)}
            calls.append(worker_group.execute_single_async(index, _prepare, environment))
        ray.get(calls, timeout=PREPARE_S)


class ElasticAxonBackend(AxonBackend):
    """`AxonBackend` without a process group. Ray Train replaces single workers."""

    has_replica_groups: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._group: PlacementGroup | None = None

    def on_start(self, worker_group: Any, backend_config: AxonConfig) -> None:
        """Prepare all workers. If Ray Train has replaced some, prepare only these."""
        super().on_start(worker_group, backend_config)
        if _is_complete(worker_group):
            self._group = worker_group.get_worker_group_state().placement_group_handle.placement_group

    def on_shutdown(self, worker_group: Any, backend_config: AxonConfig) -> None:
        """Wait, before workers end that Ray Train will replace, until Ray has the resources for new ones.

        Ray Train itself would wait for them without an end.

        Raises:
            Busy: there are none after `join_timeout_s`.
        """
        if _is_complete(worker_group) or self._group is None:
            return
        timeout_s = backend_config.cluster.join_timeout_s
        if not self._group.wait(timeout_s):
            self._group = None
            raise Busy(
                f"a worker was lost, and for {timeout_s:g} s Ray had no room to start it again; add a node, or resume "
                "from a checkpoint with fewer workers"
            )


class _ElasticContext:
    """The context around the training function: Ray's own, and leaving the job at its end."""

    def __init__(self, inner: Any) -> None:
        self._stack = contextlib.ExitStack()
        self._inner = inner

    def __enter__(self) -> None:
        self._stack.enter_context(self._inner)
        self._stack.enter_context(leaving())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return bool(self._stack.__exit__(kind, error, traceback))


def _is_complete(worker_group: Any) -> bool:
    """Return True if the group has all workers. A replica group has one of them."""
    return hasattr(worker_group, "get_replica_groups")


def _prepare(environment: Mapping[str, str]) -> None:
    """Set the variables of the job in a worker, and register the backend with torch.distributed."""
    set_environment(environment)
    importlib.import_module("axon_ps.parallel")


def _check_elastic(failures: Any) -> None:
    from ray.train.backend import Backend

    if not hasattr(Backend, "has_replica_groups"):
        raise ConfigurationError(
            f"Ray {ray.__version__} cannot replace single workers; install ray 2.60, or give "
            "AxonConfig(elastic=False), with which it restarts all of them"
        )
    if failures is not None and failures.max_failures == 0:
        _logger.warning(
            "max_failures is 0, so Ray Train ends the run when a worker is lost; give "
            "RunConfig(failure_config=FailureConfig(max_failures=...))"
        )
