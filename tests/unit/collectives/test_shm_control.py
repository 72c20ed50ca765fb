"""The control segment of ranks on one host, as two ranks of this process see it."""

from __future__ import annotations

import subprocess
import threading

import pytest

from axon_ps.collectives.backends.shm import control as control_module
from axon_ps.collectives.backends.shm.control import Control, ControlLayout
from axon_ps.errors import Broken, MemberLost
from axon_ps.host import futex, shared_memory
from axon_ps.host.peer_process import PeerProcess

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


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_hangs_up_is_lost_if_its_process_ends(monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> None:
    """It hangs up a little before it counts as ended."""
    monkeypatch.setattr(control_module, "DYING_S", LONG_S if dies else 0.0)
    layout = ControlLayout(2)
    segment, memory = shared_memory.create(layout.size_bytes)
    segment.close()
    control = Control(memory, layout, 0, (10, 11), "a group")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        control.peers[1] = PeerProcess(process.pid)
        if dies:
            threading.Timer(0.05, process.kill).start()
        error = control.hung_up(1, Broken("process 1 has hung up"))
        process.kill()
    control.close()
    if dies:
        assert isinstance(error, MemberLost)
        assert "rank 11 of group 'a group' is gone" in str(error)
    else:
        assert isinstance(error, Broken)
        assert str(error) == "rank 11: process 1 has hung up"
