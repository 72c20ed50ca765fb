"""Forming a job out of workers alone: who starts which service, and how all learn where those are.

Every worker says where it is. The worker of rank 0 starts the coordinator and says where that is, and which worker
starts which shard server: the first of every node, the nodes in turn, so that every network card carries its share.
A worker that started services stays, when it is done, until the others are.

Note: [Lives]
    torchrun starts all workers again, after a failure or when agents come and go, on the same store, with nothing that
    tells the rounds apart (not even its count of restarts, which is each agent's own). When the first worker of a round
    begins, all of the last one are dead. So rank 0 first deletes what is there; the others say where they are again
    whenever that has happened to it; everybody's word has the random name of its life, and rank 0's is believed only by
    the lives that it has heard.

Owns: nothing that lasts; `Formed` holds the services. Refuses: to be reachable from other hosts without TLS, unless
told to.
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
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import is_loopback
from axon_ps.worker.bootstrap.local_store import LocalStore
from axon_ps.worker.bootstrap.services import EmbeddedServices
from axon_ps.worker.bootstrap.stores import Store, master_of, open_store
from axon_ps.worker.environment import WorkerConfig, job_of, node_of, place_of, security_of, shards_of, worker_config

ALL_HOSTS = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_JOB = "job"
_LOOK_S = (0.005, 0.1)
"""How often the store is looked into: first, and most rarely."""

_POLL_S = 0.1
_STATUS_S = 5.0
_SILENT_S = 30.0

_formed = 0  # jobs of this process: the same number on every worker, as all begin together
_logger = logging.getLogger(__name__)


@dataclass
class Formed:
    """How a worker joins the job, and what it has started for it.

    Attributes:
        config: how to join.
        services: those of the job that this worker started; None = none.
        store: where the workers met; it is kept as long as the job, since others may use it, too.
    """

    config: WorkerConfig
    services: EmbeddedServices | None = None
    store: Store | None = None

    async def wait_for_others(self) -> None:
        """Return when no worker needs what this one has started: all have finished, left or been given up.

        Call it when this worker has left. The coordinator says who is there; when it has ended, or says nothing for
        half a minute, it is over.
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
        """End what this worker started. Harmless when repeated."""
        if self.services is not None:
            self.services.close()
        if isinstance(self.store, LocalStore):
            self.store.close()


def find_job(env: Mapping[str, str], timeout_s: float) -> Formed:
    """The job that the environment names, or one formed with all workers that the same launcher has started.

    Args:
        env: the process's environment.
        timeout_s: how long finding the others and starting services may take, in seconds.

    Raises:
        ConfigurationError: the environment does not say which job, or how; the message names what to set.
        Unreachable: nobody answers where the workers are to meet.
        Timeout: not all workers came; the message says who did not.
        Broken: the services could not be started.
    """
    if env.get("AXON_PS_COORDINATOR") or env.get("AXON_PS_STANDBY", "") not in ("", "0"):
        return Formed(worker_config(env))
    global _formed
    number, _formed = _formed, _formed + 1
    place, deadline = place_of(env), Deadline(timeout_s)
    store = open_store(env, place, number, timeout_s)
    try:
        return form_job(store, env, place.rank, place.world_size, deadline)
    except BaseException:
        if isinstance(store, LocalStore):
            store.close()
        raise


def form_job(
    store: Store, env: Mapping[str, str], rank: int, world_size: int, deadline: Deadline, *, job: str = ""
) -> Formed:
    """Form a job with all workers that call this on the same store; each gives its own rank.

    Args:
        store: its keys are for this alone.
        env: the process's environment.
        rank: this worker's.
        world_size: how many workers there are.
        deadline: by when.
        job: the job's name; empty = as the environment says.

    Raises:
        ConfigurationError, Timeout, Broken: as for `find_job`.
    """
    life = uuid.uuid4().hex
    if rank == 0:
        services, said = _start_first(store, env, world_size, deadline, job, life)
        try:
            store.set(_JOB, json.dumps(said))
            return Formed(_config(said, env, rank, world_size, job), services, store)
        except BaseException:
            services.close()
            raise
    said = _hear(store, env, rank, life, deadline)
    config = _config(said, env, rank, world_size, job)
    if str(rank) not in said["servers"]:
        return Formed(config, None, store)
    return Formed(config, _start_others(said, config, env, world_size, deadline), store)


def _config(said: Mapping[str, Any], env: Mapping[str, str], rank: int, world_size: int, job: str) -> WorkerConfig:
    """How a worker joins, by what rank 0 said and by its own environment."""
    named = {"AXON_PS_COORDINATOR": said["coordinator"], "AXON_PS_TOKEN": said["token"], "AXON_PS_TOKEN_FILE": ""}
    config = worker_config({**env, **named, "AXON_PS_JOB": job or job_of(env)})
    return dataclasses.replace(config, rank=rank, world_size=world_size)


def _start_others(
    said: Mapping[str, Any], config: WorkerConfig, env: Mapping[str, str], world_size: int, deadline: Deadline
) -> EmbeddedServices:
    """On the first worker of another node: its shard servers."""
    return EmbeddedServices(
        world_size,
        job=config.job,
        shards=said["servers"][str(config.rank)],
        num_shards=said["num_shards"],
        coordinator=said["coordinator"],
        host=ALL_HOSTS if said["several_hosts"] else LOOPBACK,
        advertise=_own_name(env) if said["several_hosts"] else "",
        security=config.security,
        environment={**env, "AXON_PS_NODE": config.node},
        start_timeout_s=deadline.remaining(),
    )


def _start_first(
    store: Store, env: Mapping[str, str], world_size: int, deadline: Deadline, job: str, life: str
) -> tuple[EmbeddedServices, dict[str, Any]]:
    """On rank 0: start what is its own, and what the others are to be told; what keeps it from that, they are told."""
    keys = {rank: _place(rank) for rank in range(world_size)}
    for key in (_JOB, *keys.values()):  # See Note: [Lives].
        store.delete_key(key)
    store.set(keys[0], _said_of_me(env, life))
    lives: dict[int, str] = {}
    try:
        places = _wait_for_places(store, keys, lives, deadline)
        services, said = _first_services(places, env, deadline, job)
    except BaseException as error:
        store.set(_JOB, json.dumps({"error": str(error) or type(error).__name__, "lives": lives}))
        raise
    return services, {**said, "lives": lives}


def _first_services(
    places: Sequence[tuple[str, str]], env: Mapping[str, str], deadline: Deadline, job: str
) -> tuple[EmbeddedServices, dict[str, Any]]:
    """The coordinator and this node's shard servers, and who starts which others."""
    nodes = list(dict.fromkeys(places))
    first_of = [places.index(node) for node in nodes]
    num_shards = shards_of(env) or len(nodes)
    servers = {rank: list(range(i, num_shards, len(nodes))) for i, rank in enumerate(first_of)}
    several_hosts = len({network for network, _ in places}) > 1
    security = security_of(env)
    if several_hosts and not (security.insecure or security.cert_file):
        raise ConfigurationError(
            "the workers are on several hosts, so the services that they start must listen beyond loopback: set "
            "AXON_PS_TLS_CERT, AXON_PS_TLS_KEY and AXON_PS_TLS_CA, or AXON_PS_INSECURE=1 to go without TLS, on all of "
            "them, or start services with `axon-ps run`"
        )
    services = EmbeddedServices(
        len(places),
        job=job or job_of(env),
        shards=servers[0],
        num_shards=num_shards,
        host=ALL_HOSTS if several_hosts else LOOPBACK,
        advertise=_own_name(env) if several_hosts else "",
        security=security,
        environment={**env, "AXON_PS_NODE": node_of(env)},
        start_timeout_s=deadline.remaining(),
    )
    said = {"coordinator": services.address, "token": services.security.token}
    others = {rank: shards for rank, shards in servers.items() if rank and shards}
    return services, {**said, "servers": others, "num_shards": num_shards, "several_hosts": several_hosts}


def _hear(store: Store, env: Mapping[str, str], rank: int, life: str, deadline: Deadline) -> dict[str, Any]:
    """On every other rank: say where it is, until rank 0 has heard it; what that says."""
    key, place = _place(rank), _said_of_me(env, life)
    what = f"rank {rank} is waiting for the worker of rank 0 to start the job's services"
    with reminding(_logger, lambda: what):
        for _ in _looks(deadline, lambda: what):
            if not store.check([key]) or store.get(key).decode() != place:
                store.set(key, place)
            said: dict[str, Any] | None = _read(store, _JOB)
            if said is not None and said["lives"].get(str(rank)) == life:
                if "error" in said:
                    raise Broken(f"rank 0 could not start the job's services: {said['error']}")
                return said
    raise AssertionError("looking ends by an error")


def _wait_for_places(
    store: Store, keys: Mapping[int, str], lives: dict[int, str], deadline: Deadline
) -> list[tuple[str, str]]:
    """On rank 0: where all workers are, by rank, once all have said it; puts into `lives` who said it."""
    places: dict[int, tuple[str, str]] = {}

    def what() -> str:
        ranks = [str(rank) for rank in keys if rank not in places]
        return f"rank 0 is waiting for the worker{'s' * (len(ranks) > 1)} of rank {', '.join(ranks)}"

    with reminding(_logger, what):
        for _ in _looks(deadline, what):
            for rank, key in keys.items():
                if rank not in places and (said := _read(store, key)) is not None:
                    network, node, lives[rank] = said
                    places[rank] = network, node
            if len(places) == len(keys):
                return [places[rank] for rank in keys]
    raise AssertionError("looking ends by an error")


def _place(rank: int) -> str:
    """The key under which a worker says where it is."""
    return f"place/{rank}"


def _said_of_me(env: Mapping[str, str], life: str) -> str:
    return json.dumps([_network(), node_of(env), life])


def _read(store: Store, key: str) -> Any:
    """What is stored there; None when nothing is."""
    try:
        return json.loads(store.get(key)) if store.check([key]) else None
    except ValueError:
        return None


def _looks(deadline: Deadline, what: Callable[[], str]) -> Iterator[None]:
    """Once for every look into the store, with ever longer pauses between them.

    Raises:
        Timeout: the time is over; the message has `what` is waited for.
    """
    pause_s, most_s = _LOOK_S
    while True:
        yield
        if deadline.expired:
            raise Timeout(f"{what()}, in vain for {deadline.timeout_s:g} s")
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(1.5 * pause_s, most_s)


def _network() -> str:
    """What processes have in common that reach each other over loopback: the kernel and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_name(env: Mapping[str, str]) -> str:
    """Under which name or address other hosts reach this one: that of the network card towards MASTER_ADDR.

    MASTER_ADDR itself where that is this host: whoever asks there for the store finds our services, too.
    """
    if given := env.get("AXON_PS_ADVERTISE"):
        return given
    master = master_of(env, place_of(env)).rpartition(":")[0].strip("[]")
    if not master:
        return socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of datagrams: it chooses the way and sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return master if own == address[0] or is_loopback(own) else own
