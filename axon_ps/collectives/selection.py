"""The choice of a group's backend: by name, or by the hosts of its ranks.

Owns: the names of the backends. A backend is imported when it is first made, so that unused ones are not loaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.errors import AxonError, ConfigurationError, Timeout
from axon_ps.types import BackendName, Member

AUTO, DEVICE = BackendName.AUTO.value, "device"
NAMES = tuple(name.value for name in BackendName if name is not BackendName.AUTO)

Make = Callable[[GroupContext], Backend]
_logger = logging.getLogger(__name__)
_registered: dict[str, Make] = {}


def register_backend(name: str, make: Make) -> None:
    """Add a backend for groups made with `name`; call it on every worker, before the first such group.

    Raises:
        ConfigurationError: the name is taken.
    """
    if name in (*NAMES, AUTO, DEVICE) or name in _registered:
        raise ConfigurationError(f"there is a backend {name!r} already; choose another name")
    _registered[name] = make


def select(members: Sequence[Member]) -> str:
    """Return the backend for host memory, by the nodes of the members.

    It is "shm" if all are on one node, "grpc" if every one is on a node of its own, else "hierarchical".
    """
    per_node = Counter(m.node for m in members)
    if len(per_node) == 1:
        return "shm"
    return "grpc" if max(per_node.values()) == 1 else "hierarchical"


def select_for_device(members: Sequence[Member]) -> str:
    """Return the backend for device memory, by the nodes of the members.

    It is "nccl" if all are on one node, else "hierarchical": NCCL inside nodes, and between them gRPC from host memory.
    """
    return "nccl" if len({m.node for m in members}) == 1 else "hierarchical"


class BackendMaker:
    """Makes the backends of a world's groups.

    Args:
        grpc: makes a backend that goes through the shard servers.
        threads: True = the ranks are threads of this process: then "auto" is "mock", for host and device memory.
    """

    def __init__(self, grpc: Make, *, threads: bool = False) -> None:
        self._grpc = grpc
        self._threads = threads

    def __call__(self, context: GroupContext, name: str) -> Backend:
        """Make the backend called `name`, or a fitting one if it is "auto" or "device" (device memory). Collective.

        Raises:
            ConfigurationError: there is no backend of that name.
            AxonError: it cannot be made here.
        """
        if self._threads and name in (AUTO, DEVICE):
            return self._named(context, "mock")
        if name == DEVICE:
            return self._for_device(context)
        if name != AUTO:
            return self._named(context, name)
        chosen = select(context.members)
        if chosen == "grpc":
            return self._grpc(context)
        return self._or_grpc(context, chosen)

    def _for_device(self, context: GroupContext) -> Backend:
        if select_for_device(context.members) == "nccl":
            return self._named(context, "nccl")
        from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend, name_of_subgroup

        # The backend for host memory may be hierarchical too, so this one needs a name of its own.
        own = replace(context, name=name_of_subgroup(context.name, DEVICE))
        return HierarchicalBackend.create(own, intra=lambda c: self._named(c, "nccl"), inter=self._grpc)

    def _named(self, context: GroupContext, name: str) -> Backend:
        if name == "shm":
            from axon_ps.collectives.backends.shm.backend import SharedMemoryBackend

            return SharedMemoryBackend(context)
        if name == "grpc":
            return self._grpc(context)
        if name == "hierarchical":
            from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend

            return HierarchicalBackend.create(context, intra=lambda c: self._named(c, "shm"), inter=self._grpc)
        if name == "gloo":
            from axon_ps.collectives.backends.gloo import GlooBackend

            return GlooBackend(context)
        if name == "nccl":
            from axon_ps.collectives.backends.nccl.backend import NcclBackend

            return NcclBackend.create(context)
        if name == "mock":
            from axon_ps.collectives.backends.mock import MockBackend

            return MockBackend(context)
        if name in _registered:
            return _registered[name](context)
        known = ", ".join((*NAMES, *_registered))
        raise ConfigurationError(f"there is no backend {name!r}; use {known} or {AUTO}")

    def _or_grpc(self, context: GroupContext, name: str) -> Backend:
        """Make the backend `name`; if a member cannot use it (no shared memory, say), make gRPC's for all of them."""
        failure: AxonError | None = None
        try:
            backend = self._named(context, name)
        except AxonError as error:
            failure = error
        reasons = self._exchange(context, "" if failure is None else str(failure))
        if not any(reasons):
            return backend
        if failure is None:
            backend.close()
        rank, reason = next((context.ranks[i], r) for i, r in enumerate(reasons) if r)
        _logger.warning("group %s goes through gRPC: rank %d cannot use %s: %s", context.name, rank, name, reason)
        return self._grpc(context)

    def _exchange(self, context: GroupContext, reason: str) -> list[str]:
        """Exchange the reasons why members cannot use the backend, by position; "" = it can."""
        key = f"group/{context.name}/made"
        context.store.put(f"{key}/{context.rank}", reason.encode() or b"-")
        reasons = []
        for position, rank in enumerate(context.ranks):
            try:
                reasons.append(context.store.wait(f"{key}/{position}", context.timeout_s).decode())
            except Timeout:
                raise Timeout(
                    f"rank {rank} did not come to make group {context.name!r} within {context.timeout_s:g} s"
                ) from None
        return ["" if r == "-" else r for r in reasons]
