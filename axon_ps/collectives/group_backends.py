"""The backends of a group: one for host memory and one for device memory, each made when it is first needed.

Owns: their making and their end, and the error that ended the group. Refuses: to know which calls are made on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.selection import AUTO, DEVICE
from axon_ps.collectives.store import AbortableStore
from axon_ps.errors import AxonError, ConfigurationError, again

MakeBackend = Callable[[GroupContext, str], Backend]
"""Makes the backend of a group by its name; collective."""


class GroupBackends:
    """The backends of one group.

    Attributes:
        store: the group's store; its waits end with the group.
        error: the error that ended the group; None while it can be used.

    Args:
        context: the group and its members.
        make: makes backends.
        name: name of the backend for host memory, or "auto".
    """

    def __init__(self, context: GroupContext, make: MakeBackend, name: str) -> None:
        self.store = AbortableStore(context.store)
        self.error: AxonError | None = None
        self._context = context
        self._make = make
        self._names = {False: name, True: "nccl" if name == "nccl" else "device"}
        self._made: dict[bool, Backend] = {}  # True: for device memory

    def get(self, device: bool, limit_s: float) -> Backend:
        """Return the backend for host or device memory. The first call for either is collective.

        Args:
            device: True = for device memory.
            limit_s: seconds that making it may take, since a rank that takes part may not come in time. If one dies,
                that ends waits on `store`.

        Raises:
            AxonError: it cannot be made.
        """
        backend = self._made.get(device)
        if backend is None:
            limit_s = min(limit_s, self._context.timeout_s)
            context = replace(self._context, store=self.store, timeout_s=limit_s, ended=lambda: self.error)
            backend = self._made[device] = self._make(context, self._names[device])
            if self.error is not None:  # aborted meanwhile, when there was no backend to abort
                backend.abort(self.error)
        return backend

    def made(self, device: bool) -> Backend | None:
        """Return the backend for host or device memory if it is made, else None."""
        return self._made.get(device)

    def end(self, error: AxonError) -> None:
        """End pending and later calls; the first error counts. Any thread may call it."""
        self.error = self.error or again(error)
        self.store.abort(error)
        for backend in list(self._made.values()):
            backend.abort(error)

    def end_unbuffered(self, error: AxonError) -> None:
        """End the waits for a member that has finished; only messages that are buffered still arrive."""
        self.store.expect_no_more(error)
        for backend in list(self._made.values()):
            if not backend.buffers_messages:
                backend.abort(error)

    def end_after_messages(self, error: AxonError) -> None:
        """End later calls, when none is pending; messages that were sent are received if all backends buffer them."""
        if all(backend.buffers_messages for backend in self._made.values()):
            self.error = again(error)
            self.store.abort(error)
        else:
            self.end(error)

    def close(self) -> None:
        """Close the backends that were made, the one for device memory first."""
        for device in (True, False):
            if (backend := self._made.pop(device, None)) is not None:
                backend.close()

    def statistics(self) -> dict[str, float]:
        """Return their counters."""
        return {k: v for _, b in sorted(self._made.items()) for k, v in b.statistics().items()}


class Siblings:
    """Returns the backend that a group was made of, and makes its siblings for sub-groups.

    Args:
        backend: the group's.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, context: GroupContext, name: str) -> Backend:
        """Return the backend for the group itself, or make one for a sub-group. Collective.

        Raises:
            ConfigurationError: a backend of another kind is asked for.
        """
        ours = self._backend
        if name not in (AUTO, DEVICE, ours.name):
            raise ConfigurationError(
                f"group {ours.context.name!r} was made of a backend {ours.name!r}, and its sub-groups are, "
                f"too; leave out backend={name!r}, or make a backend of that kind"
            )
        return ours if context.name == ours.context.name else ours.sibling(context)
