"""`axon-ps drain` and `axon-ps release` say what they have done. Tests of `cli/operate.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from axon_ps.cli import operations
from axon_ps.cli.main import main

AT = ("--coordinator", "127.0.0.1:1")


class Operator:
    """A coordinator of a job with two models, whose shard server 1 leaves when it is drained."""

    def __init__(self) -> None:
        self.servers = [SimpleNamespace(rank=rank, incarnation=f"s{rank}") for rank in range(2)]
        self.released: list[tuple[int, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def status(self) -> Any:
        models = [SimpleNamespace(name="policy", model=0), SimpleNamespace(name="critic", model=4)]
        members = SimpleNamespace(shards=list(self.servers))
        return SimpleNamespace(models=models, membership=members, counters={}, draining=())

    async def drain(self, rank: int) -> int:
        self.servers = [server for server in self.servers if server.rank != rank]
        return 3

    async def release(self, number: int, name: str) -> None:
        self.released.append((number, name))


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator()
    monkeypatch.setattr(operations, "client", lambda settings: made)
    monkeypatch.setattr(operations, "_ASK_S", 0.0)
    return made


def test_a_drain_returns_when_the_server_has_left(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "1", *AT]) == 0
    printed = capsys.readouterr()
    assert printed.out == "shard server 1 has left the job\n"
    assert [server.rank for server in operator.servers] == [0]


def test_a_model_is_released_by_its_name(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release", "critic", *AT]) == 0
    assert capsys.readouterr().out == "model 'critic' was released\n"
    assert operator.released == [(4, "critic")]


def test_a_model_that_the_job_does_not_have_is_named(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release", "actor", *AT]) == 2
    assert "the job has no model 'actor'; it has 'policy', 'critic'" in " ".join(capsys.readouterr().err.split())
    assert not operator.released
