"""Tables of fields, as functions between dataclasses and messages. The messages are those of the schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.wire.conversion import SAME, SET, Conversion, Field, checked
from axon_ps.wire.v1 import checkpoint_pb2, membership_pb2, placement_pb2, session_pb2, status_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    model: int
    step: int = 0
    version: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    step: float
    steps: float | None = None
    loss: float | None = None
    steps_per_s: float = 0.0
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    at: float = 0.0
    by_version: bool = False


def test_fields_of_the_same_name_are_copied() -> None:
    made = Conversion(Progress, membership_pb2.ModelProgress)
    message = made.to_proto(Progress(model=1, step=2, version=3))
    assert message == membership_pb2.ModelProgress(model=1, step=2, version=3)
    assert made.from_proto(message) == Progress(model=1, step=2, version=3)


def test_an_optional_number_that_is_unset_is_none_and_zero_is_zero() -> None:
    made = Conversion(Report, status_pb2.ProgressReport)
    for report in (Report(step=1.0), Report(step=1.0, steps=0.0, loss=0.0, values={"a": 1.0})):
        assert made.from_proto(made.to_proto(report)) == report
    assert isinstance(made.from_proto(status_pb2.ProgressReport()).values, dict)


def test_rows_convert_check_and_rename() -> None:
    @dataclasses.dataclass(frozen=True)
    class Copied:
        of: int
        epoch: int
        slices: frozenset[int]
        placement: int

    def even(number: int) -> int:
        if number % 2:
            raise InvalidRequest(f"{number} is odd")
        return number

    made = Conversion(Copied, placement_pb2.Copied, of=SAME.named("model"), epoch=checked(even), slices=SET)
    message = made.to_proto(Copied(1, 2, frozenset({5, 3}), 4))
    assert message == placement_pb2.Copied(model=1, epoch=2, slices=[3, 5], placement=4)
    assert made.from_proto(message).slices == {3, 5}
    with pytest.raises(InvalidRequest, match="3 is odd"):
        made.from_proto(placement_pb2.Copied(epoch=3))


def test_messages_nest_repeat_and_may_be_absent() -> None:
    @dataclasses.dataclass(frozen=True)
    class Order:
        id: int
        uri: str
        version: int
        models: tuple[Progress, ...]
        background: bool = False

    progress = Conversion(Progress, membership_pb2.ModelProgress)
    made = Conversion(Order, checkpoint_pb2.SnapshotOrder, models=progress.field.each)
    order = Order(1, "u", 2, (Progress(model=1), Progress(model=2, step=5)))
    assert made.from_proto(made.to_proto(order)) == order

    @dataclasses.dataclass(frozen=True)
    class Event:
        snapshot: Order | None

    others = tuple(field.name for field in session_pb2.SessionEvent.DESCRIPTOR.fields if field.name != "snapshot")
    event = Conversion(Event, session_pb2.SessionEvent, unread=others, snapshot=made.field.or_none)
    assert not event.to_proto(Event(None)).HasField("snapshot")
    for given in (Event(None), Event(order)):
        assert event.from_proto(event.to_proto(given)) == given


def test_values_whose_fields_do_not_fit_each_other_are_refused() -> None:
    def check(progress: Progress) -> None:
        if progress.version > progress.step:
            raise InvalidRequest("more versions than steps")

    made = Conversion(Progress, membership_pb2.ModelProgress, check=check)
    assert made.from_proto(membership_pb2.ModelProgress(step=1, version=1)).version == 1
    with pytest.raises(InvalidRequest, match="more versions than steps"):
        made.from_proto(membership_pb2.ModelProgress(version=1))


def test_a_field_may_be_left_out_on_purpose() -> None:
    made = Conversion(Progress, membership_pb2.ModelProgress, unwritten=("step",), unread=("version",))
    assert made.to_proto(Progress(model=1, step=2, version=3)) == membership_pb2.ModelProgress(model=1, version=3)
    assert made.from_proto(membership_pb2.ModelProgress(model=1, step=2, version=3)) == Progress(model=1, step=2)


@dataclasses.dataclass(frozen=True)
class Fewer:
    model: int
    step: int


@dataclasses.dataclass(frozen=True)
class More(Progress):
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Models:
    id: int
    uri: str
    version: int
    models: tuple[Any, ...]
    background: bool


@pytest.mark.parametrize(
    ("value", "message", "rows", "words"),
    [
        (Fewer, membership_pb2.ModelProgress, {}, "Fewer has no fields .'version'. of ModelProgress"),
        (More, membership_pb2.ModelProgress, {}, "ModelProgress has no field name, and no row says where name is"),
        (Models, checkpoint_pb2.SnapshotOrder, {}, "SnapshotOrder.models is made of messages, and has no row"),
        (Progress, membership_pb2.ModelProgress, {"modle": SAME}, "Progress has no field modle, which has a row"),
    ],
)
def test_a_field_that_is_forgotten_is_found_when_the_module_is_imported(
    value: type, message: Any, rows: dict[str, Field], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        Conversion(value, message, **rows)
