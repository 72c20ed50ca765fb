"""Keys of a job for a process outside it, without an event loop of its own. Tests of `worker/operator_keys.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_ps.errors import Timeout
from axon_ps.rpc.security import Security
from axon_ps.worker import operator_keys
from axon_ps.worker.operator_keys import OperatorKeys
from deadlines import HANG_S


class Operator:
    """A coordinator's keys; the waits of calls are recorded."""

    def __init__(self, address: str, **options: Any) -> None:
        self.made = address, options
        self.values: dict[str, bytes] = {}
        self.timeouts_s: list[float] = []
        self.closed = 0

    async def kv_put(self, key: str, value: bytes, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        self.values[key] = value

    async def kv_get(self, key: str, timeout_s: float) -> bytes | None:
        self.timeouts_s.append(timeout_s)
        return self.values.get(key)

    async def kv_wait(self, key: str, timeout_s: float) -> bytes:
        self.timeouts_s.append(timeout_s)
        if key not in self.values:
            raise Timeout(f"{key} was not stored")
        return self.values[key]

    async def kv_add(self, key: str, amount: int, timeout_s: float) -> int:
        self.timeouts_s.append(timeout_s)
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
        return int(self.values[key])

    async def kv_swap(self, key: str, expected: bytes, value: bytes, timeout_s: float) -> tuple[bool, bytes]:
        self.timeouts_s.append(timeout_s)
        if swapped := self.values.get(key, b"") == expected:
            self.values[key] = value
        return swapped, self.values.get(key, b"")

    async def kv_delete(self, key: str, timeout_s: float) -> bool:
        self.timeouts_s.append(timeout_s)
        return self.values.pop(key, None) is not None

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OperatorKeys, Operator]]:
    operators: list[Operator] = []

    def client(address: str, **options: Any) -> Operator:
        operators.append(Operator(address, **options))
        return operators[-1]

    monkeypatch.setattr(operator_keys, "OperatorClient", client)
    keys = OperatorKeys("a:1", security=Security(), job="job", timeout_s=HANG_S)
    yield keys, operators[0]
    keys.close()
    assert operators[0].closed == 1


def test_calls_block_until_they_are_answered(made: tuple[OperatorKeys, Operator]) -> None:
    keys, operator = made
    assert operator.made == ("a:1", {"security": Security(), "job": "job", "retries": True})
    assert keys.kv_get("key") is None
    keys.kv_put("key", b"1")
    assert (keys.kv_get("key"), keys.kv_wait("key")) == (b"1", b"1")
    assert (keys.kv_add("key", 2), keys.kv_add("new", 2)) == (3, 2)
    assert (keys.kv_delete("key"), keys.kv_delete("key")) == (True, False)
    assert set(operator.timeouts_s) == {HANG_S}


def test_a_value_is_swapped_if_it_is_the_expected_one(made: tuple[OperatorKeys, Operator]) -> None:
    keys, _ = made
    assert keys.kv_compare_and_set("key", b"", b"1")
    assert not keys.kv_compare_and_set("key", b"", b"2")
    assert keys.kv_swap("key", b"0", b"2") == (False, b"1")
    assert keys.kv_swap("key", b"1", b"2") == (True, b"2")


def test_a_wait_has_a_time_of_its_own_and_its_own_error(made: tuple[OperatorKeys, Operator]) -> None:
    keys, operator = made
    with pytest.raises(Timeout, match="key was not stored"):
        keys.kv_wait("key", 0.0)
    assert operator.timeouts_s == [0.0]
