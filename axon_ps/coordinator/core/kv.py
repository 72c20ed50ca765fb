"""The job's key-value store: small values by which workers exchange information. Pure.

The calls of a member end with its membership. The bounds are:

    a key                  1 to 512 bytes
    a value                at most 1 MiB
    keys                   at most `MAX_KEYS`; twice as many with those of `put_own`
    all keys and values    at most `MAX_TOTAL_BYTES`; `RESERVED_BYTES` more for `own` values, thrice for `put_own`
    waiting calls          at most `MAX_WAITERS`; of one caller at most `waiting.MAX_PER_CALLER`
    the wait of a call     at most `waiting.MAX_WAIT_S`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.records import kv_record
from axon_ps.coordinator.core.waiting import Waiting
from axon_ps.errors import Busy, InvalidRequest, Timeout

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 64 << 20
RESERVED_BYTES = 1 << 20
MAX_KEYS = 1 << 17
MAX_WAITERS = 1 << 14
KEY_OVERHEAD_BYTES = 128
"""Bytes counted per key in addition to key and value, so that the number of empty values is bounded, too."""

_INTEGER = re.compile(rb"-?[0-9]{1,19}")


@dataclass(frozen=True)
class KVResult:
    """The result of an operation.

    Attributes:
        found: get, wait and delete: whether the key existed; compare-and-set: whether the value was stored; else True.
        value: the value present after the operation.
        sum: add: the sum.
    """

    found: bool
    value: bytes = b""
    sum: int = 0


class KeyValues:
    """Keys, values, and the pending calls of `wait`.

    Args:
        values: the values stored before the coordinator's restart.
        out: gets the records to write and the answers.
    """

    def __init__(self, values: Mapping[str, bytes], out: Outbox) -> None:
        self._values = dict(values)
        self._bytes = sum(_cost(k, v) for k, v in self._values.items())
        self._out = out
        self._waiting = Waiting("keys", MAX_WAITERS)
        self._calls_of: dict[str, dict[int, None]] = {}  # by key, in order of arrival
        self._key_of: dict[int, str] = {}
        self._calls_by: dict[str, dict[int, None]] = {}  # by member

    def __len__(self) -> int:
        return len(self._values)

    def put(self, call: int, key: str, value: bytes, *, own: bool = False) -> None:
        """Store a value. For the coordinator's `own` values a full store has `RESERVED_BYTES` more.

        Raises:
            InvalidRequest: the key is empty, or key or value is too long.
            Busy: the store is full.
        """
        self._store(key, value, RESERVED_BYTES if own else 0)
        self._out.reply(call, KVResult(True, value))

    def peek(self, key: str) -> bytes | None:
        """Return a value, if there is one, for the coordinator itself."""
        return self._values.get(key)

    def names(self, prefix: str) -> list[str]:
        """Return the keys with a prefix, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def put_own(self, values: Mapping[str, bytes]) -> None:
        """Store values of the coordinator, all or none. Its bounds are in the docstring of this module.

        Raises:
            InvalidRequest: a key or a value is too long.
            Busy: the store is full.
        """
        added = 0
        for key, value in values.items():
            _check(key, value)
            added += max(0, _cost(key, value) - self._cost_of(key))
        keys = len(self._values) + sum(key not in self._values for key in values)
        if values and (self._bytes + added > 3 * MAX_TOTAL_BYTES or keys > 2 * MAX_KEYS):
            raise Busy(
                f"{len(values)} values of {added} bytes do not fit into the key-value store, which has {self._bytes} "
                f"bytes of at most {3 * MAX_TOTAL_BYTES}; delete what is not needed"
            )
        for key, value in values.items():
            self._set(key, value)

    def get(self, call: int, key: str) -> None:
        """Read a value."""
        _check_key(key)
        value = self._values.get(key)
        self._out.reply(call, KVResult(value is not None, value or b""))

    def wait(self, call: int, key: str, now: float, timeout_s: float, caller: str = "") -> None:
        """Read a value as soon as there is one. The answer is `Timeout` after `timeout_s`.

        Raises:
            Busy: too many calls are pending, of `caller` or of all.
        """
        _check_key(key)
        value = self._values.get(key)
        if value is not None:
            self._out.reply(call, KVResult(True, value))
            return
        self._waiting.add(call, caller, now, timeout_s)
        self._calls_of.setdefault(key, {})[call] = None
        self._key_of[call] = key
        if caller:
            self._calls_by.setdefault(caller, {})[call] = None

    def add(self, call: int, key: str, amount: int) -> None:
        """Add to a decimal integer.

        Raises:
            InvalidRequest: the stored value is not an integer, or the sum has more than 64 bits.
            Busy: the store is full.
        """
        _check_key(key)
        present = self._values.get(key, b"0")
        if not _INTEGER.fullmatch(present):
            raise InvalidRequest(f"key {key!r} holds {present[:40]!r}, which is no integer; nothing can be added to it")
        total = int(present) + amount
        if not -(1 << 63) <= total < 1 << 63:
            raise InvalidRequest(f"adding {amount} to key {key!r} makes {total}, which has more than 64 bits")
        value = str(total).encode()
        self._store(key, value)
        self._out.reply(call, KVResult(True, value, total))

    def compare_and_set(self, call: int, key: str, expected: bytes, value: bytes) -> None:
        """Store a value if the present one equals `expected`; empty = absent."""
        _check_key(key)
        present = self._values.get(key, b"")
        if present == expected:
            self._store(key, value)
            self._out.reply(call, KVResult(True, value))
        else:
            self._out.reply(call, KVResult(False, present))

    def delete(self, call: int, key: str) -> None:
        """Remove a key."""
        _check_key(key)
        self._out.reply(call, KVResult(self.remove(key)))

    def remove(self, key: str) -> bool:
        """Remove a key, for the coordinator itself; return True if there was a value."""
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= _cost(key, value)
            self._out.persist([kv_record(key, None)])
        return value is not None

    def cancel(self, call: int) -> None:
        """Forget a call that its caller does not wait for any more."""
        key = self._key_of.pop(call, None)
        if key is not None:
            caller = self._waiting.remove(call)
            if caller in self._calls_by:
                del self._calls_by[caller][call]
                if not self._calls_by[caller]:
                    del self._calls_by[caller]
            calls = self._calls_of[key]
            del calls[call]
            if not calls:
                del self._calls_of[key]

    def lost(self, caller: str, error: Exception) -> None:
        """Answer all waiting calls of a former member with an error."""
        for call in list(self._calls_by.get(caller, ())):
            self.cancel(call)
            self._out.reply(call, error)

    def tick(self, now: float) -> None:
        """Answer the waiting calls that have timed out."""
        for call in self._waiting.late(now):
            key, waited_s = self._key_of[call], self._waiting.timeout_s(call)
            self.cancel(call)
            self._out.reply(call, Timeout(f"nobody stored key {key!r} within {waited_s:g} s"))

    def next_deadline(self) -> float:
        """Return the time at which the next waiting call times out."""
        return self._waiting.next_deadline()

    def _store(self, key: str, value: bytes, reserved_bytes: int = 0) -> None:
        _check(key, value)
        grown = self._bytes + _cost(key, value) - self._cost_of(key)
        # a value that does not enlarge the store is always accepted
        if grown > max(self._bytes, MAX_TOTAL_BYTES + reserved_bytes):
            raise Busy(
                f"the key-value store holds {self._bytes} of {MAX_TOTAL_BYTES} bytes, which is the most of a job; "
                "delete what is not needed, and keep large values elsewhere"
            )
        if key not in self._values and len(self._values) >= MAX_KEYS:
            raise Busy(
                f"the key-value store has {MAX_KEYS} keys, which is the most of a job; delete what is not needed"
            )
        self._set(key, value)

    def _cost_of(self, key: str) -> int:
        return _cost(key, self._values[key]) if key in self._values else 0

    def _set(self, key: str, value: bytes) -> None:
        present = self._values.get(key)
        self._bytes += _cost(key, value) - self._cost_of(key)
        self._values[key] = value
        if value != present:
            self._out.persist([kv_record(key, value)])
        for call in list(self._calls_of.get(key, ())):
            self.cancel(call)
            self._out.reply(call, KVResult(True, value))


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + KEY_OVERHEAD_BYTES


def _check(key: str, value: bytes) -> None:
    _check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"the value of key {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")


def _check_key(key: str) -> None:
    size = len(key.encode(errors="surrogatepass"))
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidRequest(f"key {key[:40]!r} has {size} bytes; a key has 1 to {MAX_KEY_BYTES}")
