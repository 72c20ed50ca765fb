"""`axon-ps top`: what is known after some events of the feed, and what fits into a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from axon_ps.cli.terminal.top_view import KEYS, rendered
from axon_ps.cli.terminal.watched_job import POINTS, SORTS, WatchedJob
from axon_ps.wire.v1 import common_pb2, membership_pb2, status_pb2, watch_pb2

WORKER, SHARD = common_pb2.ROLE_WORKER, common_pb2.ROLE_SHARD


def begun(workers: int = 2, shards: int = 2) -> watch_pb2.WatchEvent:
    """The first event of a job."""
    members = membership_pb2.MembershipEvent(
        generation=3,
        complete=True,
        workers=[membership_pb2.Member(role=WORKER, rank=r, node="a", incarnation="w") for r in range(workers)],
        shards=[membership_pb2.Member(role=SHARD, rank=r, node="b", incarnation="s") for r in range(shards)],
    )
    return watch_pb2.WatchEvent(
        begins=True,
        history="one",
        at_s=60.0,
        status=status_pb2.StatusReply(
            job="gpt",
            membership=members,
            version=12,
            uptime_s=61.0,
            pending=["worker 1"],
            phase="training",
            headline="training",
            steps_per_s=0.5,
        ),
        steps=[watch_pb2.StepRecord(step=13, outcome="commit", duration_s=0.045, waiting_s=0.01, waited_for=1)],
        events=[watch_pb2.EventRecord(number=1, at_s=1.0, kind="joined", text="worker 0 joined")],
        curves=[watch_pb2.Curve(name="loss", at_s=[1, 2], step=[1, 2], value=[4.0, 2.0])],
        members=[
            watch_pb2.MemberLoad(role=WORKER, rank=0, sent_bytes_per_s=2e6, memory_bytes=3e8, cpu=0.5, cost_s=0.5),
            watch_pb2.MemberLoad(role=WORKER, rank=1, sent_bytes_per_s=9e6, lag_s=0.012, last_in=97, cost_s=3.0),
            watch_pb2.MemberLoad(role=SHARD, rank=1, primary_slices=4, backup_slices=5, copying_slices=1),
        ],
    )


def shown(state: WatchedJob, width: int = 80, height: int = 24, **options: object) -> list[str]:
    """The lines of the picture."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(rendered(state, "node0:7077", width, height, **options))  # type: ignore[arg-type]
    return out.getvalue().rstrip("\n").split("\n")


def test_increments_add_to_what_is_known_and_a_new_beginning_voids_it() -> None:
    state = WatchedJob()
    state.apply(begun())
    more = watch_pb2.WatchEvent(at_s=61.0, status=status_pb2.StatusReply(job="gpt", version=13))
    more.curves.add(name="loss", value=[1.0])
    more.members.add(role=WORKER, rank=1, cost_s=4.0)
    state.apply(more)
    assert state.curve("loss") == (4.0, 2.0, 1.0)
    assert state.status is not None
    assert state.status.version == 13
    assert len(state.membership.workers) == 2  # unset: as before
    assert [load.cost_s for _, _, load in state.members()] == [0.0, 0.0, 0.5, 4.0]
    state.apply(begun(workers=1))
    assert state.curve("loss") == (4.0, 2.0)
    assert len(state.members()) == 3


def test_memory_is_bounded() -> None:
    state = WatchedJob()
    state.apply(begun())
    for step in range(2 * POINTS):
        state.apply(watch_pb2.WatchEvent(steps=[watch_pb2.StepRecord(step=step)]))
    assert len(state.steps) == POINTS


def test_what_it_shows() -> None:
    state = WatchedJob()
    state.apply(begun())
    picture = "\n".join(shown(state, width=120))
    for text in (
        "job gpt at node0:7077: training", "version 12, generation 3, up 1m01s, 0.5 steps/s", "45 ms, 10 for worker 1",
        "loss 2", "waits for: worker 1", "worker 0", "2 MB", "300 MB", "4 primary, 5 backup, 1 copying",
        "12 ms, 97, cost 3 s", "59s ago  worker 0 joined", KEYS,
    ):  # fmt: skip
        assert text in picture, text


@pytest.mark.parametrize(("sort", "first"), [("rank", "shard 0"), ("cost", "worker 1"), ("memory", "worker 0")])
def test_members_are_sorted(sort: str, first: str) -> None:
    assert sort in SORTS
    state = WatchedJob()
    state.apply(begun())
    lines = shown(state, sort=sort)
    assert lines[next(i for i, line in enumerate(lines) if line.startswith("member")) + 1].startswith(first)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60)])
@pytest.mark.parametrize("workers", [1, 8, 256])
def test_it_fits_into_the_terminal(size: tuple[int, int], workers: int) -> None:
    state = WatchedJob()
    state.apply(begun(workers=workers))
    for number in range(50):
        text = f"event {number} " + "with many words " * 9
        state.apply(watch_pb2.WatchEvent(events=[watch_pb2.EventRecord(number=number, text=text)]))
    lines = shown(state, *size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    assert "event 49" in "\n".join(lines)
    assert ("more" in "\n".join(lines)) == (workers + 2 > size[1] - 11)


def test_nothing_known_is_said_plainly() -> None:
    assert shown(WatchedJob()) == ["waiting for the coordinator's first message"]
    assert shown(WatchedJob(), note="no answer for 3 s") == ["no answer for 3 s"]
