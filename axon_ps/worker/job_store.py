"""The job's key-value store for the rendezvous of groups: blocking, over the background loop."""

from __future__ import annotations

from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.rpc.background_loop import BackgroundLoop


class JobStore:
    """The job's key-value store, as a `collectives.backends.base.GroupStore`."""

    def __init__(self, loop: BackgroundLoop, coordinator: CoordinatorClient, timeout_s: float) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._loop.run(self._coordinator.kv_put(key, value, timeout_s=self._timeout_s))

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as there is one."""
        return self._loop.run(self._coordinator.kv_wait(key, timeout_s=timeout_s))

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._loop.run(self._coordinator.kv_delete(key, timeout_s=self._timeout_s))
