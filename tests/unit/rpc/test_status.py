"""The map between errors and statuses is complete in both directions."""

from __future__ import annotations

import grpc
import pytest

from axon_ps import errors
from axon_ps.errors import AxonError, Broken, GenerationChanged, InvalidRequest, PermissionDenied, Timeout, Unreachable
from axon_ps.rpc import status
from axon_ps.rpc.calls.status import ERROR_KEY


def tree(root: type[AxonError] = AxonError) -> list[type[AxonError]]:
    ours = [c for c in root.__subclasses__() if c.__module__ == errors.__name__]
    return [root, *(found for child in ours for found in tree(child))]


def rpc_error(
    code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def over_the_wire(error: AxonError) -> AxonError:
    sent = status.status_of(error)
    return status.error_of(rpc_error(sent.code, sent.details, sent.trailing), "10.0.0.1:5", "Register")


def test_every_class_of_the_tree_has_a_status() -> None:
    assert set(status.STATUS_OF) == set(tree())


def test_every_status_but_ok_has_a_class() -> None:
    assert set(status.ERROR_OF) == set(grpc.StatusCode) - {grpc.StatusCode.OK}
    assert set(status.ERROR_OF.values()) <= set(tree())


@pytest.mark.parametrize("kind", tree())
def test_every_class_survives_the_way(kind: type[AxonError]) -> None:
    arrived = over_the_wire(kind("given 3, needed 4; do this"))
    assert type(arrived) is kind
    assert str(arrived) == "given 3, needed 4; do this"
    assert arrived.__notes__ == ["raised by Register at 10.0.0.1:5"]


def test_the_generation_survives() -> None:
    arrived = over_the_wire(GenerationChanged("worker 3 left", 2**40))
    assert isinstance(arrived, GenerationChanged)
    assert arrived.generation == 2**40


def test_a_class_outside_the_tree_is_sent_as_its_ancestor() -> None:
    class OddShape(InvalidRequest):
        pass

    assert type(over_the_wire(OddShape("round"))) is InvalidRequest


def test_a_class_we_do_not_know_is_named() -> None:
    detail = status.error_to_detail(InvalidRequest("what"))
    detail.kind = "FromTheFuture"
    arrived = status.error_of(rpc_error(grpc.StatusCode.UNKNOWN, "what", ((ERROR_KEY, detail.SerializeToString()),)))
    assert type(arrived) is AxonError
    assert str(arrived) == "FromTheFuture: what"


def test_a_detail_that_cannot_be_parsed_is_ignored() -> None:
    arrived = status.error_of(rpc_error(grpc.StatusCode.NOT_FOUND, "what", ((ERROR_KEY, b"\xff\xff"),)))
    assert type(arrived) is InvalidRequest


@pytest.mark.parametrize("message", ["x" * 100_000, "ä" * 100_000, "\ud800" * 10])
def test_long_and_odd_messages_are_cut(message: str) -> None:
    sent = status.status_of(InvalidRequest(message))
    assert sent.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(sent.details) <= status.MAX_DETAILS_CHARS
    assert sent.trailing == ((ERROR_KEY, sent.error),)
    assert len(sent.error) < status.MAX_MESSAGE_BYTES + 50
    sent.details.encode()


@pytest.mark.parametrize(
    ("code", "details", "kind", "message"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; Connection refused", Unreachable, "nobody answers at h:1"),
        ("UNAVAILABLE", "errors resolving h:1", Unreachable, "nobody answers at h:1"),
        ("UNAVAILABLE", "failed to connect to all addresses; Socket closed", Unreachable, "may want TLS"),
        ("UNAVAILABLE", "failed to connect: CERTIFICATE_VERIFY_FAILED", PermissionDenied, "no authority that we trust"),
        ("UNAVAILABLE", "failed to connect: WRONG_VERSION_NUMBER", PermissionDenied, "speaks plaintext"),
        ("UNAVAILABLE", "failed to connect: Hostname Verification Check failed", PermissionDenied, "name this host"),
        ("UNAVAILABLE", "Socket closed", Broken, "broke during Register at h:1"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", Broken, "broke during Register at h:1"),
        ("CANCELLED", "", Broken, "broke during"),
        ("INTERNAL", "Received RST_STREAM with error code 2", Broken, "broke during"),
        ("UNKNOWN", "Stream removed", Broken, "broke during"),
        ("DEADLINE_EXCEEDED", "", Timeout, "Register at h:1 did not answer within 2.5 s"),
        ("UNAUTHENTICATED", "no", PermissionDenied, "Register at h:1 failed: no"),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", InvalidRequest, "too large"),
        ("RESOURCE_EXHAUSTED", "quota", errors.Busy, "quota"),
        ("UNIMPLEMENTED", "Method not found!", errors.ConfigurationError, "wrong service or version"),
        ("INTERNAL", "", errors.InternalError, "INTERNAL"),
    ],
)
def test_statuses_that_grpc_makes_itself(code: str, details: str, kind: type[AxonError], message: str) -> None:
    error = status.error_of(rpc_error(grpc.StatusCode[code], details), "h:1", "Register", timeout_s=2.5)
    assert type(error) is kind
    assert message in str(error)


def test_what_broke_after_an_answer_is_broken_whatever_the_words() -> None:
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
    assert type(status.error_of(error, "h:1", answered=False)) is Unreachable
    assert type(status.error_of(error, "h:1", answered=True)) is Broken
