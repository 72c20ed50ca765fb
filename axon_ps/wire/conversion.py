"""`Conversion`: a dataclass and a message, field by field, from a table of the fields that are not simply copied. Pure.

    CLOCK = Conversion(ReplicaClock, common_pb2.Turn)
    MEMBER = Conversion(Member, membership_pb2.Member, role=ROLE, node=name_of("a member's node", empty=True))

    message = MEMBER.to_proto(member)
    member = MEMBER.from_proto(message)

Owns: the form of the two functions. They are compiled once, at import, and cost no more than functions written by hand.
Refuses: to copy a field that one side lacks and the table does not name.

The schema determines the conversion of fields without a row: a number or a text is copied, a repeated one is a tuple, a
map is a dict, and an unset `optional` field is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

from google.protobuf.message import Message

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)

_SAME: Final = "{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A row of the table: the conversion of one field.

    Attributes:
        to_proto: makes the message's field of the value's.
        from_proto: makes the value's field of the message's; checks it.
        name: of the field in the message; empty = the same.
        optional: whether the value's field is None if the message's is unset.
    """

    to_proto: Callable[[Any], Any]
    from_proto: Callable[[Any], Any]
    name: str = ""
    optional: bool = False

    def named(self, name: str) -> Field:
        """Return the row of a field that has another name in the message."""
        return dataclasses.replace(self, name=name)

    @property
    def or_none(self) -> Field:
        """The row of a field that may be None."""
        return dataclasses.replace(self, optional=True)

    @property
    def each(self) -> Field:
        """The row of a tuple of such values, and a repeated field."""
        to_proto, from_proto = self.to_proto, self.from_proto
        return Field(
            to_proto=lambda values: [to_proto(value) for value in values],
            from_proto=lambda messages: tuple([from_proto(message) for message in messages]),
        )


class Conversion(Generic[ValueT, MessageT]):
    """The two functions between a dataclass and a message.

    Args:
        value: the dataclass.
        message: the class of messages.
        unread: fields of the message that `from_proto` leaves out.
        unwritten: fields of the dataclass that `to_proto` leaves out. `from_proto` reads those that the message has.
        check: refuses values whose fields do not fit each other.
        fields: a row for each field that is not simply copied; see the module.

    Attributes:
        to_proto: makes a message of a value.
        from_proto: makes a value of a message; raises the errors of its rows and of the dataclass.

    Raises:
        TypeError: a field is on one side only, and neither left out nor named by a row.
    """

    def __init__(
        self,
        value: type[ValueT],
        message: type[MessageT],
        *,
        unread: tuple[str, ...] = (),
        unwritten: tuple[str, ...] = (),
        check: Callable[[ValueT], None] | None = None,
        **fields: Field,
    ) -> None:
        described = message.DESCRIPTOR.fields_by_name
        names = [field.name for field in dataclasses.fields(cast(Any, value)) if field.init]
        if unknown := sorted(fields.keys() - set(names)):
            raise TypeError(f"{value.__name__} has no field {unknown[0]}, which has a row")
        known: dict[str, Any] = {"value_type": value, "message_type": message}
        to_proto, from_proto, covered = [], [], set(unread)
        for name in names:
            row = fields.get(name)
            there = (row.name if row else "") or name
            if there not in described:
                if name in unwritten:
                    continue
                raise TypeError(f"{message.__name__} has no field {there}, and no row says where {name} is")
            covered.add(there)
            known |= {f"to_{name}": row.to_proto, f"from_{name}": row.from_proto} if row else {}
            there_is = f"message.HasField({there!r})"
            if row is None:
                optional, written, read = _simple(message, there)
            else:
                optional, written, read = row.optional, f"to_{name}({{}})", f"from_{name}({{}})"
            given, got = written.format(f"value.{name}"), read.format(f"message.{there}")
            if name not in unwritten:
                to_proto.append(f"{there}=" + (f"None if value.{name} is None else {given}" if optional else given))
            if there not in unread:
                from_proto.append(f"{name}=" + (f"{got} if {there_is} else None" if optional else got))
        if lacking := set(described) - covered:
            raise TypeError(f"{value.__name__} has no fields {sorted(lacking)} of {message.__name__}")
        known["check"] = check
        made_message = f"message_type({', '.join(to_proto)})"
        made_value = f"value_type({', '.join(from_proto)})"
        body = f"return {made_value}" if check is None else f"made = {made_value}; check(made); return made"
        self.to_proto: Callable[[ValueT], MessageT] = _compiled(
            f"{value.__name__}_to_proto", "value", f"return {made_message}", known
        )
        self.from_proto: Callable[[MessageT], ValueT] = _compiled(
            f"{value.__name__}_from_proto", "message", body, known
        )

    @property
    def field(self) -> Field:
        """The row of a field that has such a value."""
        return Field(to_proto=self.to_proto, from_proto=self.from_proto)


def _same(value: Any) -> Any:
    return value


SAME: Final = Field(to_proto=_same, from_proto=_same)
"""The row of a copied field with another name in the message."""

SET: Final = Field(to_proto=sorted, from_proto=frozenset)
"""The row of a set, and a repeated field in ascending order."""


def checked(check: Callable[[Any], Any]) -> Field:
    """Return the row of a copied field. `check` returns or refuses its value when the message is read."""
    return Field(to_proto=_same, from_proto=check)


def _simple(message: type[Message], name: str) -> tuple[bool, str, str]:
    """Return whether a field without a row may be None, and its conversions as expressions."""
    empty = getattr(message(), name)
    if isinstance(empty, Message) or hasattr(empty, "add"):
        raise TypeError(f"{message.__name__}.{name} is made of messages, and has no row")
    if hasattr(empty, "items"):
        return False, _SAME, "dict({})"
    if hasattr(empty, "extend"):
        return False, _SAME, "tuple({})"
    return message.DESCRIPTOR.fields_by_name[name].has_presence, _SAME, _SAME


def _compiled(name: str, argument: str, body: str, known: dict[str, Any]) -> Any:
    scope = dict(known)
    exec(compile(f"def {name}({argument}): {body}\n", f"<{name}>", "exec"), scope)
    return scope[name]
