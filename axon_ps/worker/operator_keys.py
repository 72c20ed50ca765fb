"""The job's key-value store for a process outside the job, by blocking calls over a background loop of its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.rpc.security import Security

_MARGIN_S = 5.0
"""Seconds beyond a call's deadline after which it is given up. Before that, the call's own error is raised."""

T = TypeVar("T")


class OperatorKeys:
    """Keys and values at a coordinator; thread-safe. Close it when done.

    Calls that can safely be repeated are repeated, so they outlast a restart of the coordinator or a change of leader.

    Args:
        address: "host:port" of the coordinator; of several, with commas between them.
        security: TLS and token.
        job: the job's name.
        timeout_s: most seconds for a call.

    Every call raises `Broken` if the coordinator cannot be reached, `PermissionDenied` for a wrong token or job.
    """

    def __init__(self, address: str, *, security: Security, job: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client = OperatorClient(address, security=security, job=job, retries=True)
        self._loop = BackgroundLoop("axon-ps keys")

    def kv_put(self, key: str, value: bytes) -> None:
        """Store a value, at most 1 MiB."""
        self._run(self._client.kv_put(key, value, self._timeout_s))

    def kv_get(self, key: str) -> bytes | None:
        """Return the value of a key; None when there is none."""
        return self._run(self._client.kv_get(key, self._timeout_s))

    def kv_wait(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored in time.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self._loop.run(self._client.kv_wait(key, limit_s), limit_s + _MARGIN_S)

    def kv_add(self, key: str, amount: int) -> int:
        """Add to an integer (0 when absent) and return the sum."""
        return self._run(self._client.kv_add(key, amount, self._timeout_s))

    def kv_compare_and_set(self, key: str, expected: bytes, value: bytes) -> bool:
        """Store `value` if the present one equals `expected` (empty = absent); return True if it was stored.

        After an error: after `Broken` or `Timeout` the value may have been stored.
        """
        return self.kv_swap(key, expected, value)[0]

    def kv_swap(self, key: str, expected: bytes, value: bytes) -> tuple[bool, bytes]:
        """As `kv_compare_and_set`; also returns the value present afterwards (empty = absent)."""
        return self._run(self._client.kv_swap(key, expected, value, self._timeout_s))

    def kv_delete(self, key: str) -> bool:
        """Remove a key; return True if it existed."""
        return self._run(self._client.kv_delete(key, self._timeout_s))

    def close(self) -> None:
        """Close the connection. Call it once."""
        self._run(self._client.close())
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(call, self._timeout_s + _MARGIN_S)
