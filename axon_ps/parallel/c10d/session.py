"""`TorchSession`: the world under `torch.distributed`'s process groups over "axon", while there are any.

Owns: joining a job that exists, making one if there is none, and closing everything that it made itself. The user's
own world is never closed. A process has one session at a time.

At its beginning the first of these that exists is taken: a `World` that the user has made, the job of
`AXON_PS_COORDINATOR`, a job that the ranks form over c10d's store (`worker.bootstrap`).

Before it closes a world, each rank sets a key in the key-value store. It then waits for a limited time for the keys of
the others, because a leaving worker ends the calls of others with it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, ConfigurationError, Timeout
from axon_ps.host import fork
from axon_ps.rpc.deadlines import Deadline
from axon_ps.worker.bootstrap.job import FormedJob, form_job
from axon_ps.worker.ending import process_succeeded
from axon_ps.worker.environment import WorkerConfig, worker_config
from axon_ps.worker.world import World

LINGER_S = 10.0
"""Seconds for which a rank waits at the end for the other ranks to be done, too."""

LOSS_LINGER_S = 1.0
"""Seconds of that wait when a rank has died."""

_POLL_S = 0.25
_JOB = "c10d"

_logger = logging.getLogger(__name__)
_pause = threading.Event()  # never set: `join` pauses on it before it looks at the membership again
_joins = 0
_begun = 0  # sessions of this process so far: the same on every rank, as all begin and end together


class TorchSession:
    """See the module.

    Args:
        world: the world.
        number: number of sessions that this process had before.
        owned: True = close the world at the end.
        formed: the job that the ranks formed; None = they did not form one.

    Attributes:
        group: the world's default group.
        users: number of torch's process groups that use it.
    """

    def __init__(self, world: World, number: int, *, owned: bool, formed: FormedJob | None = None) -> None:
        self.world = world
        self._number = number
        self._owned = owned
        self._formed = formed
        self._members = {m.rank: m.id for m in world.membership.workers}
        self._incarnations = incarnations_of(world)
        self._closed = False
        self.users = 0
        self.group: ProcessGroup = world.default_group
        fork.at_exit(self._at_exit)

    @classmethod
    def begin(cls, store: Store, rank: int, world_size: int, timeout_s: float, env: Mapping[str, str]) -> TorchSession:
        """Begin a session in a world of `world_size` workers, in which this one has `rank`.

        Args:
            store: c10d's, for the address of services that rank 0 starts.
            rank: c10d's.
            world_size: c10d's.
            timeout_s: seconds that joining may take.
            env: the process's environment.

        Raises:
            ConfigurationError: the current world has another size, or this worker has another rank in it.
            Misuse: this process is a fork of a worker, or `multiprocessing` has started it and it is importing the main
                module again.
            AxonError: the job cannot be joined, or the services not be started.
        """
        fork.check_may_join()
        global _begun
        number, _begun = _begun, _begun + 1
        formed: FormedJob | None = None
        world, owned = World.current(), False
        if world is None:
            owned = True
            if env.get("AXON_PS_COORDINATOR"):
                config = dataclasses.replace(worker_config(env), rank=rank, world_size=world_size)
            else:
                own_keys = PrefixStore(f"axon/{number}", store)
                formed = form_job(own_keys, env, rank, world_size, Deadline(timeout_s), job=_JOB)
                config = formed.config
            try:
                world = join(config, timeout_s)
            except BaseException:
                if formed is not None:
                    formed.close()
                raise
        if (world.rank, world.world_size) != (rank, world_size):
            found = f"rank {world.rank} of {world.world_size}"
            if owned:
                world.close()
            raise ConfigurationError(
                f"init_process_group was called for rank {rank} of {world_size}, and this process is {found} in its "
                "axon_ps world; they must be the same"
            )
        return cls(world, number, owned=owned, formed=formed)

    @property
    def prefix(self) -> str:
        """Prefix of this session's keys and groups: no other session has these workers and this number."""
        return f"c10d-{self._incarnations}-{self._number}"

    def own(self) -> None:
        """Close the world at the end."""
        self._owned = True

    def close(self) -> None:
        """End the session. A world that the user made stays. Repeated calls do nothing.

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
                self._wait_for_others(LINGER_S)
                self.world.close()
        finally:
            if self._formed is not None:
                self._formed.close()

    def _at_exit(self) -> None:
        """End the session of a process that ends without `destroy_process_group`.

        If the process ends by an error, the world is closed as unfinished, so that the others wait for a replacement.
        """
        if not process_succeeded() and self._owned:
            self.world.close(finished=False)
        self.close()

    def _wait_for_others(self, limit_s: float) -> None:
        """Return when all ranks are done with the session, or have died, or time is up."""
        key = f"{self.prefix}/done"
        try:
            self.world.kv_put(f"{key}/{self.world.rank}", b"1")
            begun = time.monotonic()
            for rank, member in self._members.items():
                while not self._is_done(f"{key}/{rank}"):
                    alive = {m.id for m in self.world.membership.workers}
                    grace_s = limit_s if alive.issuperset(self._members.values()) else LOSS_LINGER_S
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
    """Join a job together with all its other workers. The n-th calls of all workers belong together.

    Other ranks of a job may still belong to workers that are about to leave, because a process group was destroyed and
    is made anew. So every worker publishes its member id, and waits until the world consists of the published members.

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
            published = {r: world.kv_wait(f"c10d-join/{number}/{r}", deadline.remaining()).decode() for r in members}
            complete = not config.world_size or len(members) == config.world_size
            if complete and published == members and published == {m.rank: m.id for m in world.membership.workers}:
                return world
            if deadline.expired:
                raise Timeout(f"some workers of the job did not join a process group within {timeout_s:g} s")
            _pause.wait(_POLL_S / 10)
    except BaseException:
        world.close()
        raise


def incarnations_of(world: World) -> str:
    """Return a name made of the ids of all workers. It is the same on all of them, and is never used again."""
    return uuid.uuid5(uuid.NAMESPACE_OID, "".join(m.id for m in world.membership.workers)).hex[:12]
