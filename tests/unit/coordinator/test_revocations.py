"""Revoked names are durable and told to every member; members that had them are ended.

Tests of `coordinator/core/access/revocations.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import CloseSession, Happened, Persist, Reply, SendEvent
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.errors import Busy, InvalidRequest, PermissionDenied
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Role
from axon_ps.wire.events import JoinRequest, Membership, RevokedNames, Welcome

WORKER = JoinRequest(job="job", incarnation="1" * 32, node="a", credentials=("process", "5e71a1"))
SHARD = JoinRequest(job="job", incarnation="2" * 32, node="a", address="a:1")


class Job:
    """A job of one worker and one shard server, and what is stored of it."""

    def __init__(self, store: MemoryStateStore | None = None, worker: JoinRequest = WORKER) -> None:
        self.store = store or MemoryStateStore()
        config = CoordinatorConfig(job="job", world_size=1, num_shards=1)
        self.state = CoordinatorState(config, 0.0, self.store.load(), new_id="x")
        self.sent: list[Any] = []
        self.do(self.state.join(1, Role.SHARD, SHARD, 0.0))
        self.do(self.state.join(2, Role.WORKER, worker, 0.0))

    def do(self, actions: list[Any]) -> list[Any]:
        for action in actions:
            if isinstance(action, Persist):
                self.store.apply(list(action.records))
        self.sent += actions
        return actions

    def revoke(self, target: str, reason: str = "") -> list[Any]:
        return self.do(self.state.revocations.revoke(7, Caller(job="job"), target, reason, 1.0))


def events(actions: list[Any], kind: type[Any]) -> list[tuple[int, Any]]:
    sent = [a for a in actions if isinstance(a, SendEvent) and isinstance(a.event, kind)]
    return [(session, a.event) for a in sent for session in a.sessions]


def test_a_member_is_revoked_by_all_that_it_has_shown_and_lost_at_once() -> None:
    job = Job()
    done = job.revoke("worker/0", "it leaked")
    assert isinstance(done[0], Persist)
    (closed,) = [a for a in done if isinstance(a, CloseSession)]
    assert closed.session == 2
    assert isinstance(closed.error, PermissionDenied)
    assert str(closed.error) == "the credentials of worker 0 (node a) were revoked: it leaked"
    ((session, revoked),) = events(done, RevokedNames)
    assert (session, revoked.reasons) == (1, {"process": "it leaked", "5e71a1": "it leaked"})
    assert events(done, Membership)[-1][1].workers == ()
    (reply,) = [a.result for a in done if isinstance(a, Reply)]
    assert (reply.names, reply.members, reply.has_secret) == (("process", "5e71a1"), ("worker 0 (node a)",), False)
    assert "revoked" in [a.kind for a in done if isinstance(a, Happened)]


def test_a_name_is_revoked_whoever_has_it_and_survives_a_restart() -> None:
    job = Job()
    done = job.revoke("5e71a1")
    assert [a.result.members for a in done if isinstance(a, Reply)] == [("worker 0 (node a)",)]
    assert [a.result.members for a in job.revoke("another-token") if isinstance(a, Reply)] == [()]
    again = Job(job.store)
    assert again.state.revocations.reasons == {"5e71a1": "", "another-token": ""}
    for session in (1, 2):
        mine = [a.event for a in again.sent if isinstance(a, SendEvent) and session in a.sessions]
        assert isinstance(mine[0], Welcome)
        assert mine[1] == RevokedNames(reasons={"5e71a1": "", "another-token": ""})


def test_who_can_make_itself_others_is_named() -> None:
    job = Job(worker=dataclasses.replace(WORKER, makes_itself=True))
    assert [a.result.has_secret for a in job.revoke("worker/0") if isinstance(a, Reply)] == [True]


@pytest.mark.parametrize(
    ("target", "reason", "words"),
    [
        ("worker/7", "", "the job has no worker 7; it has 0"),
        ("shard/0", "", "shard server 0 .* has shown nothing of its own .*rotate the secret"),
        ("", "", "no id of a token"),
        ("a b", "", "no id of a token"),
        ("abcd", "x" * 201, "at most 200 characters"),
        ("abcd", "a\nb", "must be printable"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(target: str, reason: str, words: str) -> None:
    job = Job()
    with pytest.raises(InvalidRequest, match=words):
        job.revoke(target, reason)
    assert not job.state.revocations.reasons
    assert len(job.state.membership.workers) == 1


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_ps.coordinator.core.access.revocations.MAX_REVOKED", 1)
    job = Job()
    job.revoke("abcd")
    with pytest.raises(Busy, match="rotate the job's secret"):
        job.revoke("efgh")
