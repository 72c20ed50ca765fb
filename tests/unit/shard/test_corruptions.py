"""A server looks for corrupt memory, stops to serve it and reports it. Tests of `shard/server/corruption.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import SliceMoved
from axon_ps.shard.core.digests import PARAM
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server import corruption
from axon_ps.shard.server.corruption import Corruptions
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.wire.events import MAX_BLOCKS, Corrupted
from engine_driver import Servers, apply, commit_of, job_of, layout_of, one_group

MODEL, EPOCH, PLACEMENT = 3, 2, 9
NUMEL = 512


class Server:
    """One server's slices of three units, whose reports are recorded."""

    def __init__(self, units: int = 3) -> None:
        layout = layout_of(*([NUMEL] for _ in range(units)))
        self.reported: list[Corrupted] = []
        self.woken = 0
        servers = Servers(job_of(layout), optimizer=one_group(layout, lr=0.1))
        servers.upload([np.ones(NUMEL, np.float32)] * units)
        self.servers, self.engine = servers, servers.engines[0]
        self.engine.set_placement(Placement((Holders((0,)),) * units, num_cuts=1, number=PLACEMENT), 0)
        shell: Any = SimpleNamespace(reports=SimpleNamespace(corrupted=self.reported.append))
        self.corruptions = Corruptions(MODEL, self.engine, shell, lambda: EPOCH, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def flip(self, number: int, element: int) -> OwnedSlice:
        owned = self.engine.slices[number]
        owned.master.values.view(np.uint32)[element] ^= np.uint32(1 << 20)
        return owned

    @property
    def slices(self) -> list[int]:
        return [report.slice for report in self.reported]


def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The slices and chunks that are checked from now on."""
    seen: list[tuple[int, int, int]] = []
    check = OwnedSlice.check

    def noted(owned: OwnedSlice, first: int, last: int) -> None:
        seen.append((owned.number, first, last))
        check(owned, first, last)

    monkeypatch.setattr(OwnedSlice, "check", noted)
    return seen


def test_a_corrupt_block_is_reported_once_and_callers_wake(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    owned = server.flip(1, 5)
    owned.check(0, len(owned.chunks.bounds))
    with caplog.at_level(logging.ERROR, corruption.__name__):
        assert server.corruptions.report(owned)
    assert "memory is corrupt: param of unit u1, elements 0 to" in caplog.text
    (report,) = server.reported
    assert (report.model, report.epoch, report.slice, report.placement) == (MODEL, EPOCH, 1, PLACEMENT)
    assert (report.generation, report.version, report.lost) == (1, 0, True)
    assert [(array, begin) for array, begin, _ in report.blocks] == [(PARAM, 0)]
    assert (server.woken, server.engine.counters["corruptions"]) == (1, 1)
    assert not server.corruptions.report(owned), "the coordinator knows of it"
    assert (len(server.reported), server.woken) == (1, 1)


def test_a_report_waits_for_the_end_of_the_update_that_checks_the_slice() -> None:
    server = Server(units=1)
    owned = server.flip(0, 0)
    owned.check(0, len(owned.chunks.bounds))
    server.servers.push(0, 0, np.ones(NUMEL, np.float32))
    server.engine.decide(commit_of(server.engine))
    assert owned.applying
    assert not server.corruptions.report(owned)
    assert not server.reported


def test_a_report_has_a_bounded_number_of_blocks() -> None:
    server = Server(units=1)
    owned = server.flip(0, 0)
    owned.check(0, len(owned.chunks.bounds))
    owned.corruptions *= MAX_BLOCKS + 1
    server.corruptions.report(owned)
    assert len(server.reported[0].blocks) == MAX_BLOCKS
    assert server.engine.counters["corruptions"] == MAX_BLOCKS + 1


def test_a_slice_is_verified_in_parts_and_a_corrupt_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "LOOKED_AT_NUMEL", 128)
    server = Server()
    seen = checked(monkeypatch)
    asyncio.run(server.corruptions.verify(server.engine.slices[0]))
    assert seen == [(0, first, first + 2) for first in (0, 2, 4, 6)]
    with pytest.raises(SliceMoved, match="slice 2 is corrupt on this shard server"):
        asyncio.run(server.corruptions.verify(server.flip(2, 300)))
    assert server.slices == [2]


@pytest.mark.parametrize("change", ["apply", "withdraw"])
def test_a_slice_that_a_step_changes_is_not_verified_further(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "LOOKED_AT_NUMEL", 64)
    server = Server(units=1)
    owned = server.engine.slices[0]
    server.servers.push(0, 0, np.ones(NUMEL, np.float32))
    seen = checked(monkeypatch)
    changes: dict[str, Callable[[], object]] = {
        "apply": lambda: apply(server.engine, commit_of(server.engine)),
        "withdraw": owned.withdraw,
    }

    async def test() -> None:
        verifying = asyncio.create_task(server.corruptions.verify(owned))
        await asyncio.sleep(0)
        changes[change]()
        await verifying

    asyncio.run(test())
    assert seen == [(0, 0, 1)]


def test_slices_that_steps_do_not_change_are_checked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "LOOKED_AT_NUMEL", 384)  # six of a slice's eight chunks
    server = Server()
    for unit in range(3):
        server.servers.push(unit, 0, np.ones(NUMEL, np.float32) if unit == 1 else None)
    apply(server.engine, commit_of(server.engine))
    seen = checked(monkeypatch)
    for _ in range(3):
        server.corruptions.look_at_unchanged()
    assert seen == [(0, 0, 6), (0, 6, 8), (2, 0, 4), (2, 4, 8), (0, 0, 2)]
    server.flip(2, NUMEL - 1), server.flip(1, 0)
    for _ in range(3):
        server.corruptions.look_at_unchanged()
    assert server.slices == [2], "the update of slice 1 checks it"
