"""`Session`: the world under `torch.distributed`'s default process group, from `init_process_group` to its destruction.

Owns: joining a job that exists, making one that does not, and closing what it made itself; nothing the user made is
closed. A process has one session at a time.

How it begins, in this order: a `World` the user has made is used; `AXON_PS_COORDINATOR` is joined; else rank 0 makes an
`EmbeddedCluster` and says in c10d's store where it is.

How it ends: whoever is done says so in the key-value store and waits a while for the others, because a worker that
leaves ends what the others still do with it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch._C._distributed_c10d import Store

from axon_ps.collectives.embedded import EmbeddedCluster
from axon_ps.collectives.ending import process_went_well
from axon_ps.collectives.environment import WorkerConfig, worker_config
from axon_ps.collectives.group import ProcessGroup
from axon_ps.collectives.world import World
from axon_ps.errors import AxonError, Broken, ConfigurationError, Timeout
from axon_ps.host import fork
from axon_ps.transport.backoff import Deadline
from axon_ps.transport.security import Security

GOODBYE_S = 10.0
"""How long the end waits for the other ranks to be done, too."""

LOSS_GOODBYE_S = 1.0
"""The same, when a rank has died."""

_POLL_S = 0.25
_JOB = "c10d"
_TRUE = ("1", "true", "yes", "on")

_logger = logging.getLogger(__name__)
_news = threading.Event()  # never set: what is waited for is the membership, which is pushed to the world
_joins = 0
_begun = 0  # sessions of this process so far: the same on every rank, as all begin and end together


class Session:
    """See the module.

    Args:
        world: the world.
        number: how many sessions this process had before.
        owned: whether to close the world.
        embedded: the services, if this worker made them.

    Attributes:
        group: the world's default group.
        users: how many process groups of torch's live on it.
    """

    def __init__(self, world: World, number: int, *, owned: bool, embedded: EmbeddedCluster | None = None) -> None:
        self.world = world
        self._number = number
        self._owned = owned
        self._embedded = embedded
        self._members = {m.rank: m.id for m in world.membership.workers}
        self._lives = lives_of(world)
        self._closed = False
        self.users = 0
        self.group: ProcessGroup = world.default_group
        fork.at_exit(self._at_exit)

    @classmethod
    def begin(cls, store: Store, rank: int, world_size: int, timeout_s: float, env: Mapping[str, str]) -> Session:
        """Have a world of `world_size` workers, in which this one has `rank`.

        Args:
            store: c10d's, for the address of services that rank 0 makes.
            rank: c10d's.
            world_size: c10d's.
            timeout_s: how long joining may take.
            env: the process's environment.

        Raises:
            ConfigurationError: the world there is has another size, or this worker another rank in it.
            Misuse: this process is a fork of a worker, or `multiprocessing` has started it and it is importing the main
                module again.
            AxonError: the job cannot be joined, or the services not be started.
        """
        fork.check_may_join()
        global _begun
        number, _begun = _begun, _begun + 1
        world, embedded, owned = World.current(), None, False
        if world is None:
            owned = True
            if env.get("AXON_PS_COORDINATOR"):
                config = dataclasses.replace(worker_config(env), rank=rank, world_size=world_size)
            else:
                config, embedded = _make_job(store, rank, world_size, number, timeout_s, env)
            try:
                world = join(config, timeout_s)
            except BaseException:
                if embedded is not None:
                    embedded.close()
                raise
        if (world.rank, world.world_size) != (rank, world_size):
            found = f"rank {world.rank} of {world.world_size}"
            if owned:
                world.close()
            raise ConfigurationError(
                f"init_process_group was called for rank {rank} of {world_size}, and this process is {found} in its "
                "axon_ps world; they must be the same"
            )
        return cls(world, number, owned=owned, embedded=embedded)

    @property
    def prefix(self) -> str:
        """Of keys and groups of this session alone: no other has these workers, or this number."""
        return f"c10d-{self._lives}-{self._number}"

    def own(self) -> None:
        """Close the world at the end."""
        self._owned = True

    def close(self) -> None:
        """End it; what the user made stays. Harmless when repeated.

        Raises:
            Misuse: this process is a fork of a worker.
        """
        fork.check()
        if self._closed:
            return
        self._closed = True
        fork.not_at_exit(self._at_exit)
        try:
            if self._owned:
                self._say_goodbye(GOODBYE_S)
                self.world.close()
        finally:
            if self._embedded is not None:
                self._embedded.close()

    def _at_exit(self) -> None:
        """The process ends without `destroy_process_group`: in order, or by an error, which the others wait for."""
        if not process_went_well() and self._owned:
            self.world.close(finished=False)
        self.close()

    def _say_goodbye(self, limit_s: float) -> None:
        """Return when all ranks are done with the session, or have died, or time is up."""
        key = f"{self.prefix}/done"
        try:
            self.world.kv_put(f"{key}/{self.world.rank}", b"1")
            begun = time.monotonic()
            for rank, member in self._members.items():
                while not self._is_done(f"{key}/{rank}"):
                    alive = {m.id for m in self.world.membership.workers}
                    grace_s = limit_s if alive.issuperset(self._members.values()) else LOSS_GOODBYE_S
                    if member not in alive or time.monotonic() - begun > grace_s:
                        break
        except AxonError as error:
            _logger.debug("the end of the session was not waited for: %s", error)

    def _is_done(self, key: str) -> bool:
        try:
            self.world.kv_wait(key, _POLL_S)
        except Timeout:
            return False
        return True


def join(config: WorkerConfig, timeout_s: float) -> World:
    """Join a job together with all other workers that call this for the same time.

    A job's other places may still be held by workers that are about to leave (a process group was destroyed and is
    made anew), so every worker says which one it is, and waits until the world consists of those.

    Raises:
        AxonError: the job cannot be joined.
        Timeout: some workers did not come.
    """
    global _joins
    number, _joins = _joins, _joins + 1
    deadline = Deadline(timeout_s)
    world = World.init(config, join_timeout_s=timeout_s)
    try:
        ours = ""
        while True:
            members = {m.rank: m.id for m in world.membership.workers}
            if ours != members.get(world.rank, ours):  # also when this worker was lost and is back
                ours = members[world.rank]
                world.kv_put(f"c10d-join/{number}/{world.rank}", ours.encode())
            said = {r: world.kv_wait(f"c10d-join/{number}/{r}", deadline.remaining()).decode() for r in members}
            whole = not config.world_size or len(members) == config.world_size
            if whole and said == members and said == {m.rank: m.id for m in world.membership.workers}:
                return world
            if deadline.passed:
                raise Timeout(f"some workers of the job did not join a process group within {timeout_s:g} s")
            _news.wait(_POLL_S / 10)
    except BaseException:
        world.close()
        raise


def lives_of(world: World) -> str:
    """A name of the workers' lives in this world: the same on all of them, and never again."""
    return uuid.uuid5(uuid.NAMESPACE_OID, "".join(m.id for m in world.membership.workers)).hex[:12]


def _make_job(
    store: Store, rank: int, world_size: int, number: int, timeout_s: float, env: Mapping[str, str]
) -> tuple[WorkerConfig, EmbeddedCluster | None]:
    """Rank 0 starts services; how every rank joins them, and what was started."""
    place = _place()
    store.set(f"axon/{number}/place/{rank}", place)
    key = f"axon/{number}/job"
    embedded: EmbeddedCluster | None = None
    if rank == 0:
        places = {store.get(f"axon/{number}/place/{r}").decode() for r in range(world_size)}
        try:
            embedded = _start(world_size, len(places) > 1, timeout_s, env)
        except BaseException as error:
            store.set(key, json.dumps({"error": str(error)}))
            raise
        said = {"coordinator": embedded.address, "token": embedded.security.token}
        store.set(key, json.dumps(said))
    said = json.loads(store.get(key))
    if "error" in said:
        raise Broken(f"rank 0 could not start the job's services: {said['error']}")
    variables = {**env, "AXON_PS_COORDINATOR": said["coordinator"], "AXON_PS_TOKEN": said["token"]}
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "AXON_PS_JOB": _JOB}
    variables.pop("AXON_PS_TOKEN_FILE", None)
    config = worker_config(variables)
    return dataclasses.replace(config, security=dataclasses.replace(config.security, insecure=_insecure(env))), embedded


def _start(world_size: int, reach_hosts: bool, timeout_s: float, env: Mapping[str, str]) -> EmbeddedCluster:
    security = Security(
        ca_file=env.get("AXON_PS_TLS_CA", ""),
        cert_file=env.get("AXON_PS_TLS_CERT", ""),
        key_file=env.get("AXON_PS_TLS_KEY", ""),
        insecure=_insecure(env),
    )
    if not reach_hosts:
        return EmbeddedCluster(world_size, job=_JOB, environment=env, start_timeout_s=timeout_s)
    if not (security.insecure or security.cert_file):
        raise ConfigurationError(
            "the workers are on several hosts, so rank 0's services must listen beyond loopback: set AXON_PS_TLS_CERT, "
            "AXON_PS_TLS_KEY and AXON_PS_TLS_CA, or AXON_PS_INSECURE=1 to go without TLS, or start them with "
            "`axon-ps run`"
        )
    name = env.get("MASTER_ADDR") or socket.gethostname()
    return EmbeddedCluster(
        world_size,
        job=_JOB,
        host="0.0.0.0",
        advertise=name,
        security=security,
        environment=env,
        start_timeout_s=timeout_s,
    )


def _place() -> str:
    """What processes have in common that reach each other over loopback: the kernel and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _insecure(env: Mapping[str, str]) -> bool:
    return env.get("AXON_PS_INSECURE", "").lower() in _TRUE
