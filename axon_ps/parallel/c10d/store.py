"""`KVStore`: torch.distributed's `Store` over the coordinator's key-value store.

torch calls it from Python and, through `PrefixStore` and its own backends, from C++. C++ calls some methods by other
names. Both names are here. Values are bytes, and text is stored in UTF-8.

Invariants:
- A value is stored with one byte before it, so that an empty value differs from an absent one. Numbers of `add` are
  stored without it, because the coordinator adds them. No number begins with that byte.
- The keys of one store begin with its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.worker.operator_keys import OperatorKeys
from axon_ps.worker.world import World

_VALUE = b"="
_COUNT = "#keys"
_DEFAULT_TIMEOUT_S = 300.0

Bytes = str | bytes | bytearray | Sequence[int]


class KVStore(Store):
    """A c10d store that all workers of a job share.

    Args:
        world: the worker's membership in the job; for a process that is not a member, the job's key-value store.
        prefix: the beginning of its keys.
        timeout_s: seconds that `get` and `wait` wait.

    Methods that read or write keys raise the errors of the coordinator's store:

        InvalidRequest      a key of more than 512 bytes, or a value of more than 1 MiB
        Busy                the store is full
        Broken, Closed      it cannot be reached
    """

    def __init__(
        self, world: World | OperatorKeys, prefix: str = "c10d", timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> None:
        super().__init__()
        self._world = world
        self._prefix = prefix
        self._timeout_s = timeout_s

    # ------------------------------------------------------------------ one key

    def set(self, key: str, value: Bytes) -> None:
        """Store a value."""
        content = _VALUE + _bytes(value)
        if self._world.kv_compare_and_set(self._key(key), b"", content):
            self._count(1)
        else:
            self._world.kv_put(self._key(key), content)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once there is one.

        Raises:
            Timeout: it was not stored in time.
        """
        return self._wait(key, self._timeout_s)

    def add(self, key: str, value: int) -> int:
        """Add to an integer (0 when absent), and return the sum.

        Raises:
            InvalidRequest: the stored value is not an integer.
        """
        name = self._key(key)
        if self._world.kv_compare_and_set(name, b"", str(value).encode()):
            self._count(1)
            return value
        present = self._world.kv_get(name)
        if present is not None and present.startswith(_VALUE):  # a number that was stored by `set`
            self._world.kv_compare_and_set(name, present, str(_integer(key, present[1:])).encode())
        return self._world.kv_add(name, value)

    def append(self, key: str, value: Bytes) -> None:
        """Append a value to the stored one."""
        name, more = self._key(key), _bytes(value)
        while True:
            present = self._world.kv_get(name)
            if self._world.kv_compare_and_set(name, present or b"", _VALUE + _plain(present) + more):
                if present is None:
                    self._count(1)
                return

    def compare_set(self, key: str, expected_value: Bytes, desired_value: Bytes) -> bytes:
        """Store a value if the present one equals the expected one, or is absent and none is expected.

        Returns:
            The value that is stored afterwards; when there is none, the expected one.
        """
        name, expected, desired = self._key(key), _bytes(expected_value), _bytes(desired_value)
        while True:
            present = self._world.kv_get(name)
            if present is None and expected:
                return expected
            if present is not None and _plain(present) != expected:
                return _plain(present)
            if self._world.kv_compare_and_set(name, present or b"", _VALUE + desired):
                if present is None:
                    self._count(1)
                return desired

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return True if it was there."""
        existed = self._world.kv_delete(self._key(key))
        if existed:
            self._count(-1)
        return existed

    # ------------------------------------------------------------------ several keys

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of the keys have values."""
        return all(self._world.kv_get(self._key(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all of the keys have values.

        Raises:
            Timeout: some have none in time; the message names the first.
        """
        limit_s = self._timeout_s if timeout is None or timeout <= timedelta() else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        for key in keys:
            self._wait(key, max(0.0, deadline - time.monotonic()))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, as soon as they are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Bytes]) -> None:
        """Store a value for each key.

        Raises:
            InvalidRequest: the numbers of keys and values differ.
        """
        if len(keys) != len(values):
            raise InvalidRequest(f"multi_set was given {len(keys)} keys and {len(values)} values; give as many")
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """Return the number of keys in this store."""
        return int(self._world.kv_get(self._key(_COUNT)) or b"0")

    # ------------------------------------------------------------------ about it

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time for which `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The time for which `get` and `wait` wait."""
        return timedelta(seconds=self._timeout_s)

    def has_extended_api(self) -> bool:
        """Return True: it has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> KVStore:
        """Return another handle on the same keys."""
        return KVStore(self._world, self._prefix, self._timeout_s)

    # C++ calls them by these names.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys
    multiGet = multi_get
    multiSet = multi_set
    hasExtendedApi = has_extended_api

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _count(self, change: int) -> None:
        self._world.kv_add(self._key(_COUNT), change)

    def _wait(self, key: str, limit_s: float) -> bytes:
        try:
            return _plain(self._world.kv_wait(self._key(key), limit_s))
        except Timeout as error:
            raise Timeout(f"nobody stored {key!r} in the c10d store within {limit_s:g} s") from error


def _bytes(value: Bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _plain(stored: bytes | None) -> bytes:
    """Return the value that was stored as `stored`."""
    return (stored or b"").removeprefix(_VALUE)


def _integer(key: str, content: bytes) -> int:
    try:
        return int(content)
    except ValueError:
        raise InvalidRequest(f"key {key!r} is {content[:40]!r}, which is no integer; nothing can be added") from None
