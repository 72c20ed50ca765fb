"""The control segment of ranks on one host, as two ranks of this process see it."""

from __future__ import annotations

import threading

import pytest

from axon_ps.collectives.backends.shm.control import Control, ControlLayout
from axon_ps.errors import MemberLost
from axon_ps.host import futex, shared_memory

LONG_S = 20.0


def test_an_abort_is_seen_by_all_ranks_before_one_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ControlLayout(2)
    segment, memory = shared_memory.create(layout.size_bytes)
    segment.close()
    mine, peers = (Control(memory, layout, rank, (10, 11), "a group") for rank in range(2))
    publishing, go_on = threading.Event(), threading.Event()

    def settle() -> None:
        publishing.set()
        assert go_on.wait(LONG_S)

    monkeypatch.setattr(futex, "settle", settle)
    aborting = threading.Thread(target=mine.abort, args=(MemberLost("rank 77 has left the job"),))
    aborting.start()
    assert publishing.wait(LONG_S)
    mine.check()  # else this thread could close the group now, and the peer would see that first
    go_on.set()
    aborting.join(LONG_S)
    for control in (mine, peers):
        with pytest.raises(MemberLost, match="^rank 77 has left the job$"):
            control.check()
