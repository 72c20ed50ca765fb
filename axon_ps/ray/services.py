"""`Services`: coordinator and shard servers of one job as Ray actors, from their placement to their end.

The actors live as long as the process that made them (a driver, or Ray Train's controller), and no longer: Ray ends
them with it. Ray would keep a controller's reservation until the driver ends, so `placement.release_with` frees it.
Until then Ray starts an actor again when its process or node has died. Shard servers start on the node to which Ray
moves their bundle. Coordinators start on their own node alone, because members know them by their addresses. That node
is the head, whose death ends the Ray cluster. With their state in etcd, there may be several, on several nodes.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import remove_placement_group

from axon_ps.errors import Timeout
from axon_ps.ray.config import ClusterConfig
from axon_ps.ray.placement import RayNode, create_placement_group, in_bundle, nodes, on_node, release_with
from axon_ps.ray.service import STOP_S, CoordinatorActor, ServiceConfig, ShardActor
from axon_ps.rpc.channels import join_address
from axon_ps.rpc.deadlines import Deadline
from axon_ps.worker.environment import security_variables

LOOPBACK, ALL_HOSTS = "127.0.0.1", "0.0.0.0"
_logger = logging.getLogger(__name__)


class Services:
    """The services of one job; see the module.

    Args:
        config: as the user gave it.
        world_size: workers that the job starts with; 0 = as the first of them requests.

    Attributes:
        config: the same, with a name of the job and a token.
        address: "host:port" of the coordinator; of several, with commas between them.
        coordinators: their actors.
        shards: the shard servers' actors.

    Raises:
        Busy: Ray could not place the shard servers.
        Timeout: they did not start in time.
        ConfigurationError: nodes are on several hosts, and the token is too weak.
        AxonError: a service could not start.
    """

    def __init__(self, config: ClusterConfig, world_size: int = 0) -> None:
        self.config = config = config.named()
        self.address = ""
        self.coordinators: list[Any] = []
        self.shards: list[Any] = []
        deadline = Deadline(config.start_timeout_s)
        bundles = [config.resources_per_shard] * config.shards
        self._group = create_placement_group("the shard servers", bundles, config.placement, deadline.remaining())
        try:
            present = nodes()
            service = self._service(present)
            self._start_coordinators(present, service, world_size, deadline)
            self._start_shards(service, deadline)
            if ray.get_runtime_context().get_actor_id() is not None:
                release_with(self.shards[0], self._group)
        except BaseException:
            self.close()
            raise
        _warn_of_one_node(config, len(present))

    def environment(self, node: str) -> dict[str, str]:
        """Return the variables by which a worker on a Ray node joins the job."""
        values = {"COORDINATOR": self.address, "JOB": self.config.job, "NODE": node}
        named = {f"AXON_PS_{name}": value for name, value in values.items() if value}
        return named | security_variables(self.config.security)

    def close(self) -> None:
        """End all of them in order, the shard servers first. Each kind gets `STOP_S`, and is then killed."""
        for actors in (self.shards, self.coordinators):
            stopping = [actor.stop.remote() for actor in actors]
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S) if stopping else None
            for actor in actors:
                ray.kill(actor)
            actors.clear()
        remove_placement_group(self._group)

    def _service(self, present: list[RayNode]) -> ServiceConfig:
        config, one_host = self.config, len({node.ip for node in present}) == 1
        host = LOOPBACK if one_host else ALL_HOSTS
        config.security.check_bind(host)
        return ServiceConfig(
            host=host,
            ip=present[0].ip if one_host else "",
            security=config.security,
            plugins=config.plugins,
            log_level=config.log_level,
            roots=config.checkpoint_roots,
            directories=(*filter(None, (config.checkpoint_dir, config.resume)), os.getcwd()),
        )

    def _start_coordinators(
        self, present: list[RayNode], service: ServiceConfig, world_size: int, deadline: Deadline
    ) -> None:
        config, chosen = self.config, [present[i % len(present)] for i in range(self.config.coordinators)]
        job = config.coordinator(world_size)
        for node in chosen:
            actor = ray.remote(CoordinatorActor).options(**on_node(node), max_restarts=-1)
            self.coordinators.append(actor.remote(job, service, secrets.token_hex(8), config.state))
        hosts = [node.ip if not service.ip else LOOPBACK for node in chosen]
        ports = _ports("coordinator", self.coordinators, deadline)
        self.address = ",".join(join_address(host, port) for host, port in zip(hosts, ports, strict=True))

    def _start_shards(self, service: ServiceConfig, deadline: Deadline) -> None:
        config = self.config
        threads = max(1, int(config.resources_per_shard.get("CPU", 1)))
        for index in range(config.shards):
            options = in_bundle(self._group, index, config.resources_per_shard)
            actor = ray.remote(ShardActor).options(**options, max_restarts=-1, max_concurrency=2)
            self.shards.append(actor.remote(config.job, self.address, service, threads))
        _ports("shard servers", self.shards, deadline)


def _ports(what: str, actors: list[Any], deadline: Deadline) -> list[int]:
    """Wait until all services listen; returns their ports."""
    left_s = deadline.remaining()
    try:
        return list(ray.get([actor.port.remote(left_s) for actor in actors], timeout=left_s + 1.0))
    except GetTimeoutError:
        raise Timeout(
            f"the {what} did not start within {deadline.timeout_s:g} s; `ray status` shows what Ray waits for"
        ) from None


def _warn_of_one_node(config: ClusterConfig, num_nodes: int) -> None:
    if num_nodes == 1 and config.coordinator(0).copies > 1:
        _logger.warning("all shard servers are on one Ray node, so its death takes every copy; add nodes")
