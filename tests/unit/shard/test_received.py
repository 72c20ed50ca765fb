"""What a worker has of parameters that travel as differences: what is added, refused, forgotten and found out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from axon_ps.compress import Int4, cast
from axon_ps.errors import Broken, InvalidRequest, StepAborted
from axon_ps.kernels.digest import digest
from axon_ps.shard.client.received import Gathering, Received
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.v1 import common_pb2

C = Int4()
CHUNK, NUMEL = 64, 150
SLICE = Slice(unit=0, server=0, begin=0, end=NUMEL)
CHUNKS = [(0, 64), (64, 128), (128, 150)]
HYPER: tuple[Hyper, ...] = ({"lr": 0.1},)
OTHER: tuple[Hyper, ...] = ({"lr": 0.2},)
Message = tuple[common_pb2.Chunk, bytes]


def normals(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(NUMEL, dtype=np.float32)


def digest_of(values: Array) -> int:
    return digest(values.view(np.uint32), 0, values.size)


@dataclass
class Server:
    """The other end, in numpy."""

    values: Array = field(default_factory=lambda: normals(0))
    version: int = 3

    def full(self) -> list[Message]:
        return [(self._header(b, e, self.values), self.values[b:e].tobytes()) for b, e in CHUNKS]

    def same(self, begin: int = 0, end: int = NUMEL) -> Message:
        header = self._header(begin, end, self.values)
        header.absent = True
        return header, b""

    def step(self, seed: int, *, commits: bool = True) -> list[Message]:
        messages, after = [], self.values.copy()
        for b, e in CHUNKS:
            data = np.empty(C.compressed_bytes(e - b), np.uint8)
            C.compress(normals(seed)[b:e], data)
            C.accumulate(data, after[b:e])
            header = self._header(b, e, after)
            header.compressed, header.base, header.version = True, self.version, self.version + 1
            messages.append((header, data.tobytes()))
        if commits:
            self.values, self.version = after, self.version + 1
        return messages

    def _header(self, begin: int, end: int, values: Array) -> common_pb2.Chunk:
        return common_pb2.Chunk(
            version=self.version,
            offset=begin,
            numel=end - begin,
            dtype=common_pb2.D_TYPE_F32,
            digest=digest_of(values[begin:end]),
        )


def gathering(
    received: Received, out: Array, *, min_version: int = 0, epoch: int = 0, begin: int = 0, **speculative: Any
) -> Gathering:
    received.open(0, NUMEL)
    return Gathering(
        received=received,
        s=SLICE,
        begin=0,
        end=NUMEL,
        chunk_numel=CHUNK,
        compressor=C,
        epoch=epoch,
        min_version=min_version,
        out=out,
        out_begin=begin,
        dtype={2: DType.BF16, 4: DType.F32}[out.itemsize],
        **speculative,
    )


def speculative(received: Received, out: Array, step: int = 1, hyper: tuple[Hyper, ...] = HYPER) -> Gathering:
    return gathering(received, out, step=step, expected=hyper)


def take(g: Gathering, messages: list[Message]) -> None:
    for header, payload in messages:
        g.take(header, memoryview(payload))


def gathered(received: Received, messages: list[Message], **asked: int) -> Array:
    out = np.empty(NUMEL, np.float32)
    g = gathering(received, out, **asked)
    take(g, messages)
    assert not g.refused
    return out


def test_differences_are_added_and_nothing_is_asked_for_twice() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    assert received.nbytes == 0
    assert gathering(received, out).since is None
    assert gathering(received, out).finished() is None
    assert np.array_equal(gathered(received, server.full(), min_version=3), server.values)
    for seed in range(1, 5):
        assert gathering(received, out).since == server.version
        assert gathering(received, out, min_version=server.version + 1).finished() is None
        messages = server.step(seed)
        assert np.array_equal(gathered(received, messages, min_version=server.version), server.values)
        out[:] = 0
        assert gathering(received, out, min_version=server.version).finished() == server.version
        assert np.array_equal(out, server.values)
    assert received.nbytes == 4 * NUMEL
    assert received.mismatches == 0


def test_what_has_not_changed_is_confirmed_for_the_version_that_was_asked_for() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full(), min_version=3)
    assert gathering(received, out, min_version=8).finished() is None
    assert np.array_equal(gathered(received, [server.same()], min_version=8), server.values)
    assert gathering(received, out, min_version=8).finished() == 3
    assert gathering(received, out, min_version=9).finished() is None
    take(gathering(received, out, min_version=5), [server.same(0, 64), server.same(64, NUMEL)])
    assert gathering(received, out, min_version=8).finished() == 3, "nor is that forgotten"
    assert gathering(received, out).since == 3


def test_another_epoch_begins_with_nothing() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full(), epoch=1)
    assert gathering(received, out, epoch=2).since is None
    assert gathering(received, out, epoch=2).finished() is None
    assert gathering(received, out, epoch=1).since == 3


def test_a_difference_is_not_added_to_what_has_come_in_another_epoch_meanwhile() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full(), epoch=1)
    g, messages = gathering(received, out, epoch=1), server.step(1)
    gathered(received, Server(normals(9)).full(), epoch=2)
    take(g, messages)
    assert g.refused
    assert received.mismatches == 0


def test_only_whole_chunks_are_known() -> None:
    received, server = Received(), Server()
    gathered(received, server.full())
    assert received.version(0, 64, NUMEL, 0) == 3
    assert received.version(0, 0, 100, 0) is None
    assert received.version(0, 10, 64, 0) is None
    assert received.find(0, 0, 100) is None


def test_a_gather_goes_into_another_dtype_and_a_range() -> None:
    received, server = Received(), Server()
    out = np.zeros(40, np.uint16)
    take(gathering(received, out, begin=50), server.full())
    expected = np.empty(40, np.uint16)
    cast.encode(server.values[50:90], expected, DType.BF16)
    assert np.array_equal(out, expected)
    again = np.zeros(40, np.uint16)
    assert gathering(received, again, begin=50).finished() == 3
    assert np.array_equal(out, again)


def test_a_gather_that_broke_is_repeated_from_what_had_come() -> None:
    received, server = Received(), Server()
    gathered(received, server.full())
    messages = server.step(1)
    out = np.empty(NUMEL, np.float32)
    take(gathering(received, out), messages[:2])
    again = gathering(received, out)
    assert again.since == 3, "the oldest of what there is"
    assert gathering(received, out, min_version=4).finished() is None
    take(again, messages)
    assert not again.refused
    assert np.array_equal(out, server.values)
    server.step(2)
    assert np.array_equal(gathered(received, server.full()), server.values), "all of it, over what there is"


def test_two_gathers_at_once_add_a_difference_once() -> None:
    received, server = Received(), Server()
    gathered(received, server.full())
    messages = server.step(1)
    outs = [np.empty(NUMEL, np.float32) for _ in range(2)]
    both = [gathering(received, out) for out in outs]
    for message in messages:
        for g in both:
            take(g, [message])
    assert not both[0].refused
    assert not both[1].refused
    assert all(np.array_equal(out, server.values) for out in outs)


def test_a_changed_bit_is_found_where_nothing_is_asked_for() -> None:
    received, server, out = Received(), Server(), np.zeros(NUMEL, np.float32)
    gathered(received, server.full())
    received.values(0, 0, 64).view(np.uint32)[1] ^= 1
    received.values(0, 64, 128).view(np.uint32)[1] ^= 1 << 31
    assert gathering(received, out).finished() is None
    assert received.mismatches == 2
    assert not out.any()
    assert gathering(received, out).since is None
    assert np.array_equal(gathered(received, server.full()), server.values)
    assert gathering(received, out).finished() == 3


@pytest.mark.parametrize("where", ["difference", "same", "added before"])
def test_a_changed_bit_is_found_and_everything_is_gathered(where: str, caplog: pytest.LogCaptureFixture) -> None:
    received, server = Received(), Server()
    gathered(received, server.full())
    messages = server.step(1)
    out = np.empty(NUMEL, np.float32)
    if where != "difference":
        gathered(received, messages)
    g = gathering(received, out)
    if where == "added before":  # by a gather beside this one
        messages = server.step(2)
        take(gathering(received, out), messages)
    received.values(0, 64, 128).view(np.uint32)[17] ^= 1 << 5
    with caplog.at_level(logging.WARNING):
        take(g, [server.same()] if where == "same" else messages)
    assert g.refused
    assert received.mismatches == 1
    assert "elements" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1
    assert gathering(received, out).since is None
    assert np.array_equal(gathered(received, server.full()), server.values)
    assert np.array_equal(gathered(received, server.step(3)), server.values)


def test_all_values_that_are_not_those_that_were_sent_are_not_taken() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    messages = server.full()
    messages[1][0].digest += 1
    with pytest.raises(Broken, match="did not arrive as they were sent"):
        take(gathering(received, out), messages)
    assert gathering(received, out).since is None


def wrong(message: Message, **fields: object) -> Message:
    header = common_pb2.Chunk()
    header.CopyFrom(message[0])
    for name, value in fields.items():
        if value is None:
            header.ClearField(name)
        else:
            setattr(header, name, value)
    return header, message[1]


LIES: dict[str, dict[str, object]] = {
    "base that was not asked for": {"base": 2},
    "no base": {"base": None},
    "no digest": {"digest": None},
    "numel": {"numel": 63},
    "too many": {"numel": 65},
    "unit": {"unit": 1},
    "dtype": {"dtype": common_pb2.D_TYPE_BF16},
    "unknown dtype": {"dtype": common_pb2.D_TYPE_UNSPECIFIED},
    "no later version": {"version": 3},
    "not compressed": {"compressed": False},
    "absent with a base": {"absent": True},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("expected", [False, True], ids=["decided", "speculative"])
def test_a_header_that_lies_is_refused_and_changes_nothing(lie: str, expected: bool) -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    messages = server.step(1)
    g = speculative(received, out) if expected else gathering(received, out)
    aborted = expected and lie == "base that was not asked for"  # the server may be a version later
    with pytest.raises(StepAborted if aborted else InvalidRequest):
        take(g, [wrong(messages[0], **LIES[lie])])
    assert np.array_equal(gathered(received, messages), server.values)


@pytest.mark.parametrize("expected", [False, True], ids=["decided", "speculative"])
def test_a_payload_that_is_no_difference_is_refused_and_changes_nothing(expected: bool) -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    messages = server.step(1)
    header, payload = messages[0]
    for data in (b"", payload[:-1], payload + b"\0", b"\xff" * len(payload)):
        g = speculative(received, out) if expected else gathering(received, out)
        with pytest.raises(InvalidRequest):
            take(g, [(header, data)])
    for lie in ({"compressed": True}, {"base": 3}, {"numel": 63}, {"dtype": common_pb2.D_TYPE_BF16}):
        with pytest.raises(InvalidRequest):
            take(gathering(received, out), [wrong(server.full()[0], **lie)])
    assert np.array_equal(gathered(received, messages), server.values)
    with pytest.raises(InvalidRequest):
        take(gathering(Received(), out), messages)  # nothing was asked to be added to
    with pytest.raises(InvalidRequest):
        take(gathering(Received(), out), [server.same()])


def test_what_another_gather_has_forgotten_is_gathered_again() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    g = gathering(received, out)
    received.forget(0, 64, 128)
    take(g, server.step(1))
    assert g.refused
    assert received.mismatches == 0


@pytest.mark.parametrize("decided", ["as expected", "otherwise", "aborted", "not yet", "long ago"])
def test_a_speculative_gather_moves_what_there_is_once_its_step_has_committed(decided: str) -> None:
    received, server, out = Received(), Server(), np.zeros(NUMEL, np.float32)
    gathered(received, server.full(), min_version=3)
    before = server.values.copy()
    commits = decided in ("as expected", "long ago")
    take(speculative(received, out, 7), server.step(1, commits=commits))
    if commits:
        assert np.array_equal(out, server.values)
    assert np.array_equal(received.values(0, 0, NUMEL), before), "it stays until the decision"
    assert received.nbytes == 4 * NUMEL + sum(C.compressed_bytes(e - b) for b, e in CHUNKS)
    if decided != "not yet":
        received.settle(7, {"as expected": HYPER, "long ago": HYPER, "otherwise": OTHER, "aborted": None}[decided])
    for step in range(8, 30) if decided == "long ago" else ():
        received.settle(step, HYPER)
    again = np.empty(NUMEL, np.float32)
    finished = gathering(received, again, min_version=4).finished()
    assert finished == (4 if decided == "as expected" else None)
    if decided == "as expected":
        assert np.array_equal(again, server.values)
        assert np.array_equal(gathered(received, server.step(2), min_version=5), server.values)
    assert gathering(received, again).since == (5 if decided == "as expected" else 3)
    if decided == "not yet":
        assert received.nbytes > 4 * NUMEL
    else:
        assert received.nbytes == 4 * NUMEL


def test_what_was_gathered_after_the_decision_is_not_added_again() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    g = speculative(received, out)
    ordinary, messages = gathering(received, out, min_version=4), server.step(1)
    take(g, messages)
    take(ordinary, messages)  # one that was under way
    received.settle(1, HYPER)
    assert gathering(received, out, min_version=4).finished() == 4
    assert np.array_equal(out, server.values)
    assert received.mismatches == 0


def test_a_speculative_gather_needs_something_to_add_to() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    with pytest.raises(StepAborted, match="has no version of all of unit 0"):
        speculative(received, out)
    gathered(received, server.full())
    g = speculative(received, out)
    received.forget(0, 64, 128)
    with pytest.raises(StepAborted, match="does not have version 3 of unit 0"):
        take(g, server.step(1))


def test_all_values_in_place_of_a_speculative_difference_are_not_taken() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    g = speculative(received, out)
    server.step(1)
    with pytest.raises(StepAborted):
        take(g, server.full())  # memory of the server's had failed
    with pytest.raises(StepAborted):
        take(g, server.step(2))  # it is at a later version than this worker
    assert gathering(received, out).since == 3


def test_a_changed_bit_is_found_in_a_speculative_gather() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    messages = server.step(1, commits=False)
    received.values(0, 0, 64).view(np.uint32)[1] ^= 1
    with pytest.raises(StepAborted):
        take(speculative(received, out), messages)
    assert received.mismatches == 1
    assert gathering(received, out).since is None


def test_a_bit_that_changes_before_the_decision_is_found() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    take(speculative(received, out), server.step(1))
    received.values(0, 0, 64).view(np.uint32)[1] ^= 1
    received.settle(1, HYPER)
    assert gathering(received, out).since is None
    assert received.mismatches == 1


def test_when_the_parameters_were_replaced_nothing_is_left() -> None:
    received, server, out = Received(), Server(), np.empty(NUMEL, np.float32)
    gathered(received, server.full())
    under_way, messages = gathering(received, out), server.step(1)
    renewed = received.renewed()
    assert renewed.nbytes == 0
    assert gathering(renewed, out).since is None
    take(under_way, messages)  # goes on with what it began with
    assert np.array_equal(out, server.values)
