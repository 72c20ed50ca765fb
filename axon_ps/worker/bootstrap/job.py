"""Forming a job of workers that a launcher has started: which worker starts which service, and the addresses.

Every worker stores its location. The worker of rank 0 starts the coordinator and gives the others its address. It also
announces which worker starts which shard server. The first worker of every node starts shard servers, round-robin over
the nodes, so that the traffic is spread over all network cards. A worker that started services stays until the others
are done.

Note: [Incarnations]
    torchrun starts all workers again after a failure, or when agents come and go. The store stays the same, and nothing
    distinguishes the rounds: even the count of restarts is each agent's own. When the first worker of a round begins,
    all workers of the last round are dead. So rank 0 first overwrites every key with null, and each other worker stores
    its location again whenever its key holds another value. A location contains the random incarnation of its worker.
    Rank 0's announcement contains the incarnations that it is for. A worker ignores an announcement without its own. No
    key is deleted: a store's `get` blocks until a key exists, so a worker between `check` and `get` would be stuck.

Owns: nothing durable; `FormedJob` holds the services. Refuses: to be reachable from other hosts without TLS, unless
`AXON_PS_INSECURE` is set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import AxonError, Broken, ConfigurationError, Timeout
from axon_ps.observe.reminders import reminding
from axon_ps.observe.variables import misspelt
from axon_ps.rpc.auth.loopback import is_loopback
from axon_ps.rpc.deadlines import Deadline
from axon_ps.texts import value_of_json
from axon_ps.worker.bootstrap import private
from axon_ps.worker.bootstrap.local_store import LocalStore
from axon_ps.worker.bootstrap.services import EmbeddedServices
from axon_ps.worker.bootstrap.stores import C10dStore, master_of, open_store
from axon_ps.worker.environment import WorkerConfig, job_of, launch_info, node_of, security_of, shards_of, worker_config

ALL_HOSTS = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_JOB = "job"
_POLL_PAUSES_S = (0.005, 0.1)
"""Seconds between two polls of the store: at first, and at most."""

_POLL_S = 0.1
_STATUS_S = 5.0
_SILENT_S = 30.0

_formed = 0  # jobs of this process: the same number on every worker, as all begin together
_logger = logging.getLogger(__name__)


@dataclass
class FormedJob:
    """The configuration of a worker, and the services that it has started for the job.

    Attributes:
        config: the worker's configuration.
        services: those of the job that this worker started; None = none.
        store: the store by which the job was formed. It stays open as long as the job, since others may use it, too.
        private: the store by which this worker serves the secrets to the others of this host; see `private`.
    """

    config: WorkerConfig
    services: EmbeddedServices | None = None
    store: C10dStore | None = None
    private: LocalStore | None = None

    async def wait_for_others(self) -> None:
        """Block until no worker needs the services of this one: all have finished, left or been lost.

        Call it when this worker has left. It polls the coordinator for the members. It also returns when the
        coordinator has ended, or has not replied for half a minute.
        """
        if self.services is None:
            return
        what = "the other workers"
        async with OperatorClient(self.services.address, security=self.config.security, job=self.config.job) as job:
            with reminding(_logger, lambda: f"this worker is done, and keeps the job's services running for {what}"):
                silent = Deadline(_SILENT_S)
                while not silent.expired:
                    try:
                        members = (await job.status(timeout_s=_STATUS_S)).membership
                    except Timeout:
                        continue
                    except AxonError:
                        return
                    if not members.workers:
                        return
                    what = " and ".join(f"worker {m.rank} (node {m.node})" for m in members.workers)
                    silent = Deadline(_SILENT_S)
                    await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """End the services and stores of this worker. Repeated calls do nothing."""
        if self.services is not None:
            self.services.close()
        for store in (self.store, self.private):
            if isinstance(store, LocalStore):
                store.close()


def find_job(env: Mapping[str, str], timeout_s: float) -> FormedJob:
    """Return the job that the environment names, or form one with all workers of the same launcher.

    Args:
        env: the process's environment.
        timeout_s: most seconds for finding the others and starting services.

    Raises:
        ConfigurationError: the environment does not say which job, or how. The message names what to set.
        Unreachable: no server answers at the store's address.
        PermissionDenied: a process of another user serves the workers' store.
        Timeout: workers are missing. The message names them.
        Broken: the services could not be started.
    """
    launch, deadline = launch_info(env), Deadline(timeout_s)
    for message in misspelt(env).values() if launch.rank <= 0 else ():  # only one of the workers warns
        _logger.warning("%s", message)
    if env.get("AXON_PS_COORDINATOR") or env.get("AXON_PS_STANDBY", "") not in ("", "0"):
        return FormedJob(worker_config(env))
    global _formed
    number, _formed = _formed, _formed + 1
    store = open_store(env, launch, number, timeout_s)
    try:
        return form_job(store, env, launch.rank, launch.world_size, deadline)
    except BaseException:
        if isinstance(store, LocalStore):
            store.close()
        raise


def form_job(
    store: C10dStore, env: Mapping[str, str], rank: int, world_size: int, deadline: Deadline, *, job: str = ""
) -> FormedJob:
    """Form a job with all workers that call this on the same store. Each gives its own rank.

    Args:
        store: its keys are used for nothing else.
        env: the process's environment.
        rank: this worker's.
        world_size: number of workers.
        deadline: for all of it.
        job: the job's name; empty = that of the environment.

    Raises:
        ConfigurationError, Unreachable, PermissionDenied, Timeout, Broken: as for `find_job`.
    """
    incarnation = uuid.uuid4().hex
    if rank == 0:
        return _form_first(store, env, world_size, deadline, job, incarnation)
    announcement = _receive_announcement(store, env, rank, incarnation, deadline)
    if announcement["several_hosts"]:
        access = private.own(security_of(env), announcement["coordinator"])
    else:
        access = private.receive(announcement["incarnations"]["0"], deadline)
    config = _config(access, env, rank, world_size, job, several_hosts=announcement["several_hosts"])
    if str(rank) not in announcement["servers"]:
        return FormedJob(config, None, store)
    return FormedJob(config, _start_others(announcement, config, env, world_size, deadline), store)


def _form_first(
    store: C10dStore, env: Mapping[str, str], world_size: int, deadline: Deadline, job: str, incarnation: str
) -> FormedJob:
    """Start services on rank 0, and announce them to the others."""
    services, announcement = _start_first(store, env, world_size, deadline, job, incarnation)
    several_hosts, served = announcement["several_hosts"], None
    try:
        access = private.CoordinatorAccess(services.address, next(iter(services.security.tokens()), ""))
        if not several_hosts:
            served = private.serve(access, incarnation, deadline.remaining())
        store.set(_JOB, json.dumps(announcement))
        private.announce(services.address, made_secret=not security_of(env).tokens() and bool(access.token))
        config = _config(access, env, 0, world_size, job, several_hosts=several_hosts)
        return FormedJob(config, services, store, served)
    except BaseException:
        services.close()
        if served is not None:
            served.close()
        raise


def _config(
    access: private.CoordinatorAccess,
    env: Mapping[str, str],
    rank: int,
    world_size: int,
    job: str,
    *,
    several_hosts: bool,
) -> WorkerConfig:
    """Return the configuration of a worker, from the access that rank 0 gave and its own environment."""
    given = {"AXON_PS_COORDINATOR": access.coordinator}
    if not several_hosts:
        given |= {"AXON_PS_TOKEN": access.token, "AXON_PS_TOKEN_FILE": ""}
    config = worker_config({**env, **given, "AXON_PS_JOB": job or job_of(env)})
    http_port = None if config.http_port is None else 0  # the port in the environment is the coordinator's
    return dataclasses.replace(
        config,
        rank=rank,
        world_size=world_size,
        http_port=http_port,
        security=private.secured(config.security, several_hosts=several_hosts),
    )


def _start_others(
    announcement: Mapping[str, Any], config: WorkerConfig, env: Mapping[str, str], world_size: int, deadline: Deadline
) -> EmbeddedServices:
    """Start the shard servers of another node, on its first worker."""
    return EmbeddedServices(
        world_size,
        job=config.job,
        shards=announcement["servers"][str(config.rank)],
        num_shards=announcement["num_shards"],
        coordinator=config.coordinator,
        host=ALL_HOSTS if announcement["several_hosts"] else LOOPBACK,
        advertise=_own_name(env) if announcement["several_hosts"] else "",
        security=config.security,
        environment={**env, "AXON_PS_NODE": config.node},
        start_timeout_s=deadline.remaining(),
    )


def _start_first(
    store: C10dStore, env: Mapping[str, str], world_size: int, deadline: Deadline, job: str, incarnation: str
) -> tuple[EmbeddedServices, dict[str, Any]]:
    """Start the services of rank 0, and return them and the announcement. An error is announced, too."""
    keys = {rank: _location_key(rank) for rank in range(world_size)}
    for key in (_JOB, *keys.values()):  # See Note: [Incarnations].
        store.set(key, "null")
    store.set(keys[0], json.dumps(_own_location(env, incarnation)))
    incarnations: dict[int, str] = {}
    try:
        locations = _wait_for_locations(store, keys, incarnations, deadline)
        services, announcement = _first_services(locations, env, deadline, job)
    except BaseException as error:
        reported = {"error": str(error) or type(error).__name__, "refused": isinstance(error, ConfigurationError)}
        store.set(_JOB, json.dumps({**reported, "incarnations": incarnations}))
        raise
    return services, {**announcement, "incarnations": incarnations}


def _first_services(
    locations: Sequence[tuple[str, str]], env: Mapping[str, str], deadline: Deadline, job: str
) -> tuple[EmbeddedServices, dict[str, Any]]:
    """Start the coordinator and this node's shard servers; return them and the announcement."""
    nodes = list(dict.fromkeys(locations))
    first_of = [locations.index(node) for node in nodes]
    num_shards = shards_of(env) or len(nodes)
    servers = {rank: list(range(i, num_shards, len(nodes))) for i, rank in enumerate(first_of)}
    several_hosts = len({network for network, _ in locations}) > 1
    security = private.secured(security_of(env), several_hosts=several_hosts)
    services = EmbeddedServices(
        len(locations),
        job=job or job_of(env),
        shards=servers[0],
        num_shards=num_shards,
        host=ALL_HOSTS if several_hosts else LOOPBACK,
        advertise=_own_name(env) if several_hosts else "",
        security=security,
        environment={**env, "AXON_PS_NODE": node_of(env)},
        start_timeout_s=deadline.remaining(),
    )
    # See Note: [Nothing secret is in the store].
    announcement = {"coordinator": services.address} if several_hosts else {}
    others = {rank: shards for rank, shards in servers.items() if rank and shards}
    return services, {**announcement, "servers": others, "num_shards": num_shards, "several_hosts": several_hosts}


def _receive_announcement(
    store: C10dStore, env: Mapping[str, str], rank: int, incarnation: str, deadline: Deadline
) -> dict[str, Any]:
    """Store this worker's location until rank 0 has read it, and return the announcement; on all ranks but 0."""
    key, location = _location_key(rank), _own_location(env, incarnation)
    what = f"rank {rank} is waiting for the worker of rank 0 to start the job's services"
    with reminding(_logger, lambda: what):
        for _ in _polls(deadline, lambda: what):
            if _read(store, key) != location:
                store.set(key, json.dumps(location))
            announcement: dict[str, Any] | None = _read(store, _JOB)
            if announcement is not None and announcement["incarnations"].get(str(rank)) == incarnation:
                if "error" in announcement:
                    kind = ConfigurationError if announcement.get("refused") else Broken
                    raise kind(f"rank 0 could not start the job's services: {announcement['error']}")
                return announcement
    raise AssertionError("polling ends by an error")


def _wait_for_locations(
    store: C10dStore, keys: Mapping[int, str], incarnations: dict[int, str], deadline: Deadline
) -> list[tuple[str, str]]:
    """Return, on rank 0, the locations of all workers by rank; put their incarnations into `incarnations`."""
    locations: dict[int, tuple[str, str]] = {}

    def what() -> str:
        ranks = [str(rank) for rank in keys if rank not in locations]
        return f"rank 0 is waiting for the worker{'s' * (len(ranks) > 1)} of rank {', '.join(ranks)}"

    with reminding(_logger, what):
        for _ in _polls(deadline, what):
            for rank, key in keys.items():
                if rank not in locations and (location := _read(store, key)) is not None:
                    network, node, incarnations[rank] = location
                    locations[rank] = network, node
            if len(locations) == len(keys):
                return [locations[rank] for rank in keys]
    raise AssertionError("polling ends by an error")


def _location_key(rank: int) -> str:
    """Return the key of a worker's location."""
    return f"location/{rank}"


def _own_location(env: Mapping[str, str], incarnation: str) -> list[str]:
    return [_network(), node_of(env), incarnation]


def _read(store: C10dStore, key: str) -> Any:
    """Return the value stored there; None when there is none."""
    try:
        return value_of_json(store.get(key), key) if store.check([key]) else None
    except ValueError:
        return None


def _polls(deadline: Deadline, what: Callable[[], str]) -> Iterator[None]:
    """Yield once for every poll of the store, with ever longer pauses between them.

    Raises:
        Timeout: the time is over. The message begins with `what`.
    """
    pause_s, most_s = _POLL_PAUSES_S
    while True:
        yield
        if deadline.expired:
            raise Timeout(f"{what()}, in vain for {deadline.timeout_s:g} s")
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(1.5 * pause_s, most_s)


def _network() -> str:
    """Return the kernel and network namespace: equal for processes that reach each other over loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_name(env: Mapping[str, str]) -> str:
    """Return the name or address at which other hosts reach this one: AXON_PS_ADVERTISE, if it is set.

    Otherwise it is the address of the network card towards MASTER_ADDR, or the host's name if that is unknown. It is
    MASTER_ADDR itself where that names this host: a worker that finds the store there finds the services, too.
    """
    if given := env.get("AXON_PS_ADVERTISE"):
        return given
    master = master_of(env, launch_info(env)).rpartition(":")[0].strip("[]")
    if not master:
        return socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: this chooses the route and sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return master if own == address[0] or is_loopback(own) else own
