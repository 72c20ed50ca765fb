"""SPIFFE IDs: what is written is read, and nothing else."""

from __future__ import annotations

import pytest

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.identity import Identity, Principal, identity_of

ELSEWHERE = "spiffe://example.org/ns/{job}/sa/axon-{role}"


@pytest.mark.parametrize("rank", [None, 0, 17])
@pytest.mark.parametrize("role", list(Principal))
def test_what_is_written_is_read(role: Principal, rank: int | None) -> None:
    identity = Identity(role, "a.job-1_x", rank)
    assert identity_of(identity.uri()) == identity


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("spiffe://axon-ps/job/j/boss", "the role 'boss'; the roles are coordinator, shard, worker"),
        ("spiffe://axon-ps/job/j", "not of the form"),
        ("spiffe://axon-ps/job/j/worker/", "not of the form"),
        ("spiffe://axon-ps/job/j/worker/rank/01", "not of the form"),
        ("spiffe://axon-ps/job/j/worker/rank/-1", "not of the form"),
        ("spiffe://axon-ps/job/j/k/worker", "not of the form"),
        ("spiffe://axon-ps/job//worker", "not of the form"),
        ("spiffe:///job/j/worker", "not of the form"),
        ("https://axon-ps/job/j/worker", "not of the form"),
        ("spiffe://axon-ps/job/j/worker\n", "not of the form"),
    ],
)
def test_another_form_is_refused_by_name(uri: str, words: str) -> None:
    with pytest.raises(PermissionDenied, match=words):
        identity_of(uri)


def test_any_trust_domain_may_be_the_users() -> None:
    assert identity_of("spiffe://prod.example/job/j/shard") == Identity(Principal.SHARD, "j")


def test_a_pattern_says_where_job_and_role_are() -> None:
    assert identity_of("spiffe://example.org/ns/gpt/sa/axon-worker", ELSEWHERE) == Identity(Principal.WORKER, "gpt")
    assert identity_of("spiffe://x/axon-shard", "spiffe://x/axon-{role}") == Identity(Principal.SHARD, "")
    with pytest.raises(PermissionDenied, match="not of the form"):
        identity_of("spiffe://example.org/ns/gpt/sa/other", ELSEWHERE)


@pytest.mark.parametrize(
    "pattern", ["https://x/{role}", "spiffe://x/{job}", "spiffe://x/{role}/{role}", "spiffe://{a}/{role}"]
)
def test_a_pattern_that_cannot_work_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="the SPIFFE pattern"):
        identity_of("spiffe://x/worker", pattern)


def test_a_jobs_name_that_cannot_be_in_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be in a certificate"):
        Identity(Principal.WORKER, "my job").uri()
