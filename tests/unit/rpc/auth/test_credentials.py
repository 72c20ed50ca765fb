"""What a server makes of certificate and token together, and what is revoked while calls are under way."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from axon_ps.errors import PermissionDenied
from axon_ps.rpc.auth import credentials as module
from axon_ps.rpc.auth import watched_file
from axon_ps.rpc.auth.authority import authority_of
from axon_ps.rpc.auth.credentials import EVERYBODY, Credentials, Ended, Guard, Revoked, Unknown, stream_end
from axon_ps.rpc.auth.identity import EVERY_ROLE, Identity, Principal
from axon_ps.rpc.auth.tokens import mint, new_secret
from axon_ps.rpc.security import Security
from axon_ps.wire.v1 import shard_pb2
from deadlines import HANG_S
from rpc_fakes import run, serving

SECRET = new_secret()
STATUS, GATHER = "/axon_ps.wire.v1.Coordinator/Status", "/axon_ps.wire.v1.Shard/AllGather"


def guard(**options: Any) -> Guard:
    return Guard(Security(token=SECRET, observer_token="only-reads", **options).acting(Principal.SHARD, "j"))


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def certificate(role: Principal, rank: int | None = None, job: str = "j") -> bytes:
    return authority_of(SECRET).issue(Identity(role, job, rank), 60.0).chain


def test_both_must_allow() -> None:
    found = guard().credentials(bearer(SECRET), certificate(Principal.WORKER, 2))
    assert (found.roles, found.rank, found.has_secret) == (frozenset({Principal.WORKER}), 2, True)
    token = mint(SECRET, Identity(Principal.OBSERVER, "j"), 60.0)
    assert not guard().credentials(bearer(token), certificate(Principal.WORKER)).roles
    with pytest.raises(PermissionDenied, match="nobody .*different roles"):
        guard().admit(STATUS, bearer(token), certificate(Principal.WORKER))
    ranked = mint(SECRET, Identity(Principal.WORKER, "j", 1), 60.0)
    with pytest.raises(Unknown, match="two ranks"):
        guard().credentials(bearer(ranked), certificate(Principal.WORKER, 2))


def test_one_is_enough_and_none_is_not() -> None:
    assert guard().credentials(bearer(SECRET), b"").roles == EVERY_ROLE
    assert guard().credentials(bearer("only-reads"), b"").roles == {Principal.OBSERVER}
    assert guard().credentials(b"", certificate(Principal.SHARD)).roles == {Principal.SHARD}
    for wrong, words in ((b"", "none was given"), (bearer("x"), "none of this server's"), (b"Basic x", "none of this")):
        with pytest.raises(Unknown, match=words):
            guard().credentials(wrong, b"")
    with pytest.raises(Unknown, match="the certificate is of job 'k', and this is job 'j'"):
        guard().credentials(b"", certificate(Principal.SHARD, job="k"))


def test_without_tokens_everybody_may_and_a_certificate_still_names_a_role() -> None:
    open_to_all = Guard(Security())
    assert open_to_all.credentials(b"", b"") is EVERYBODY
    assert open_to_all.credentials(b"", certificate(Principal.WORKER)).roles == {Principal.WORKER}


def test_who_may_join_with_which_rank() -> None:
    worker = Credentials(frozenset({Principal.WORKER}), 3, ("x",), False, text="worker of rank 3")
    assert [worker.check_join(Principal.WORKER, rank) for rank in (-1, 3)] == [3, 3]
    assert EVERYBODY.check_join(Principal.SHARD, -1) == -1
    with pytest.raises(PermissionDenied, match="worker of rank 3 may not join as worker 4"):
        worker.check_join(Principal.WORKER, 4)
    with pytest.raises(PermissionDenied, match="may not join the job as a shard"):
        worker.check_join(Principal.SHARD, 3)


def test_a_token_file_that_is_rotated_is_accepted_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    new = new_secret()
    (tmp_path / "token").write_text(f"{SECRET}\n")
    security = Security(token_file=str(tmp_path / "token"))
    rotated = Guard(security)
    with pytest.raises(Unknown):
        rotated.credentials(bearer(new), b"")
    for content in (f"{SECRET}\n{new}\n", f"{new}\n{SECRET}\n"):
        (tmp_path / "token").write_text(content)
        assert all(rotated.credentials(bearer(token), b"").has_secret for token in (SECRET, new))
        assert security.metadata() == (("authorization", f"Bearer {content.split()[0]}"),)
    (tmp_path / "token").write_text(f"{new}\n")
    with pytest.raises(Unknown):
        rotated.credentials(bearer(SECRET), b"")


def test_a_token_file_that_is_half_written_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    security = Security(token_file=str(tmp_path / "token"))
    had = security.metadata()
    for half in (b"", b"\n", b"\xff"):
        (tmp_path / "token").write_bytes(half)
        assert security.metadata() == had
    (tmp_path / "token").write_text("another-secret-of-a-test")
    assert security.metadata() == (("authorization", "Bearer another-secret-of-a-test"),)


def test_revoking_ends_calls_under_way_and_refuses_new_ones() -> None:
    token, other = (mint(SECRET, Identity(Principal.WORKER, "j"), 60.0) for _ in range(2))
    began: list[str] = []

    async def stats(_: Any, __: Any) -> shard_pb2.StatsReply:
        return shard_pb2.StatsReply()

    async def collective(context: Any) -> None:
        began.append("")
        await context.write(b"")
        await context.read()

    async def main() -> None:
        server = Security(token=SECRET)
        async with (
            serving(security=server, client=Security(token=token), stats=stats, collective=collective) as s,
            s.stub.open("Collective", timeout_s=HANG_S) as stream,
        ):
            await stream.read()
            revoked = guard().credentials(bearer(token), b"").names
            s.server.revocations.set({revoked[0]: "it leaked"})
            with pytest.raises(PermissionDenied, match=rf"\({revoked[0]}\) were revoked: it leaked"):
                await stream.read()
            with pytest.raises(PermissionDenied, match="were revoked: it leaked"):
                await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)
        async with serving(security=server, client=Security(token=other), stats=stats) as s:
            s.server.revocations.set({revoked[0]: "it leaked"})
            await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)

    run(main())
    assert began


def test_a_task_that_is_cancelled_otherwise_stays_so() -> None:
    async def main() -> None:
        revocations = guard().revocations
        credentials = Credentials(frozenset(), None, ("a",), False, text="x")

        async def serve() -> None:
            with revocations.watching(credentials):
                await asyncio.Event().wait()

        for ends, error in (
            (lambda t: t.cancel(), asyncio.CancelledError),
            (lambda _: revocations.set({"a": ""}), Revoked),
        ):
            task = asyncio.create_task(serve())
            await asyncio.sleep(0)
            ends(task)
            with pytest.raises(error):
                await task

    run(main())


def test_a_stream_ends_with_its_credentials_unless_the_same_caller_has_shown_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)

    def until(seconds: float, text: str = "worker 1", *, has_secret: bool = False) -> Credentials:
        return Credentials(frozenset(), None, (), has_secret, time.time() + seconds, text)

    async def main() -> None:
        revocations = guard().revocations

        async def serve(credentials: Credentials, newer: Credentials | None, is_stream: bool) -> None:
            with revocations.watching(credentials, is_stream=is_stream):
                end = stream_end()
                assert (end is not None) == is_stream
                if end is not None and newer is not None:
                    end.extend(newer)
                await asyncio.Event().wait()

        async def ends(credentials: Credentials, newer: Credentials | None = None, *, is_stream: bool = True) -> bool:
            task = asyncio.create_task(serve(credentials, newer, is_stream))
            done, _ = await asyncio.wait([task], timeout=0.3)
            if not done:
                task.cancel()
                await asyncio.wait([task])
                return False
            with pytest.raises(Ended, match="the credentials that this stream was opened with .worker 1. are over"):
                task.result()
            return True

        assert await ends(until(0))
        assert await ends(until(0), until(60, "worker 2"))
        assert not await ends(until(0), until(60))
        assert not await ends(until(0), until(math.inf, "a holder of the job's secret", has_secret=True))
        assert not await ends(until(60))
        assert not await ends(until(0), is_stream=False), "a call that waits has a time-out"

    run(main())


def test_a_client_opens_another_stream_once_it_has_newer_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    new = new_secret()
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n{new}\n")

    async def main() -> None:
        security = Security(token_file=str(file))
        async with serving(security=security, client=security) as s:
            stream = s.stub.open("AllGather")
            assert stream.is_current()
            assert await stream.is_free()
            file.write_text(f"{new}\n{SECRET}\n")
            assert not stream.is_current()
            assert not await stream.is_free()
            assert s.stub.open("AllGather").is_current()

    run(main())
