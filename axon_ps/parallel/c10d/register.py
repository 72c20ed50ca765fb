"""Entries for torch.distributed: the creator of process groups of the backend "axon", and the rendezvous `axon://`.

Both are registered by `axon_ps_torch`, which `import torch` loads. This is the only module of `c10d` that reads the
environment.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import ConfigurationError, Misuse
from axon_ps.parallel.c10d import objects
from axon_ps.parallel.c10d.process_group import AxonProcessGroup
from axon_ps.parallel.c10d.session import TorchSession, incarnations_of, join
from axon_ps.parallel.c10d.store import KVStore
from axon_ps.worker.environment import worker_config
from axon_ps.worker.world import World

_JOIN_TIMEOUT = timedelta(seconds=300)

_session: TorchSession | None = None
_joined: World | None = None  # by `axon://`, for the session that is about to begin
_rendezvous_count = 0
_stores: WeakKeyDictionary[World, list[KVStore]] = WeakKeyDictionary()
"""References to stores: torch has only the C++ half of a store, which does nothing without the Python half."""


def create(options: Any, backend_options: object) -> AxonProcessGroup:
    """Make a process group. torch calls this on every member.

    Raises:
        ConfigurationError: an option cannot be met, or the axon_ps world is another one than torch's.
        Misuse: there is a default group over axon already, or no world for a group of some ranks.
        AxonError: the job cannot be joined, or the services not be started.
    """
    if getattr(options, "enable_reconfigure", False):
        raise ConfigurationError(
            "init_process_group was given enable_reconfigure=True; a group over axon cannot be reconfigured: leave it "
            "out, and after a loss destroy the process group and make it anew"
        )
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        warnings.warn(
            "TORCH_DIST_NAN_CHECK has no effect on a group over axon: torch's check does not see its operations",
            stacklevel=2,
        )
    if os.environ.get(objects.ALLOW_PICKLE) != "1":
        objects.install()
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    session = _session
    if not ranks:
        if session is not None:
            raise Misuse("there is a process group over axon already; destroy it before you make the default one")
        session = _begin(options.store, options.group_rank, options.group_size, timeout_s)
        return _wrapped(session, session.group, options.store, timeout_s, is_default=True)
    if session is None:  # the default process group is over another backend
        if len(ranks) != dist.get_world_size() and World.current() is None:
            raise Misuse(
                "a group of some ranks over axon needs a world of all of them: call init_process_group('axon'), or "
                "axon_ps.World.init() on every rank first"
            )
        session = _begin(options.store, dist.get_rank(), dist.get_world_size(), timeout_s)
    group = session.group.named_group(f"{session.prefix}/{options.group_id}", ranks, timeout_s=timeout_s)
    return _wrapped(session, group, options.store, timeout_s)


def _begin(store: Store, rank: int, world_size: int, timeout_s: float) -> TorchSession:
    global _session, _joined
    _session = TorchSession.begin(store, rank, world_size, timeout_s, os.environ)
    if _joined is _session.world:
        _session.own()
    _joined = None
    return _session


def _wrapped(
    session: TorchSession, group: ProcessGroup, store: Store, timeout_s: float, *, is_default: bool = False
) -> AxonProcessGroup:
    """Wrap our group as torch's. The session ends with the default group, or with its last group."""
    session.users += 1

    def on_shutdown() -> None:
        global _session
        session.users -= 1
        if not is_default:
            group.close()
        if is_default or session.users == 0:
            if _session is session:
                _session = None
            session.close()

    def split(ranks: list[int], name: str, timeout_s: float) -> AxonProcessGroup:
        positions = [session.group.ranks.index(group.ranks[r]) for r in ranks]
        subgroup = session.group.named_group(f"{session.prefix}/{name}", positions, timeout_s=timeout_s)
        return _wrapped(session, subgroup, PrefixStore(f"{name}/", store), timeout_s)

    return AxonProcessGroup(group, store, timeout_s=timeout_s, on_shutdown=on_shutdown, split=split)


def rendezvous(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and world size for `axon://` or `axon://coordinator:port`.

    Rank and world size are the world's. The store is the coordinator's. A world that the user has made is used.
    Otherwise the job is joined. If there is no world and no address of a coordinator, this is torch's `env://`.

    Raises:
        ConfigurationError: a given rank or world size differs from the world's.
        Misuse: the iterator is used a second time.
        AxonError: the job cannot be joined.
    """
    global _joined, _rendezvous_count
    address = urlparse(url)
    world = World.current()
    if world is None:
        if not (address.netloc or os.environ.get("AXON_PS_COORDINATOR")):
            yield from torch_rendezvous(f"env://?{address.query}" if address.query else "env://", timeout=timeout)
            return
        variables = {**os.environ, **({"AXON_PS_COORDINATOR": address.netloc} if address.netloc else {})}
        world = _joined = join(worker_config(variables), (timeout or _JOIN_TIMEOUT).total_seconds())
    wanted = dict(parse_qsl(address.query))
    for name, ours in (("rank", world.rank), ("world_size", world.world_size)):
        if int(wanted.get(name, -1)) not in (-1, ours):
            raise ConfigurationError(
                f"init_process_group was given {name}={wanted[name]}; in the axon_ps world it is {ours}"
            )
    prefix = f"rendezvous-{incarnations_of(world)}-{_rendezvous_count}"
    _rendezvous_count += 1
    store = KVStore(world, prefix)
    _stores.setdefault(world, []).append(store)
    yield store, world.rank, world.world_size
    raise Misuse("a second rendezvous over axon:// with the same iterator is not possible")
