"""The fields, values and calls of the schema, as text: what a protocol version must not lose.

python tests/upgrade/protocol_fields.py > tests/upgrade/protocol_N.txt       # when protocol version N begins
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import axon_ps.wire.v1


def fields() -> list[str]:
    """Every field as "MESSAGE NUMBER = TYPE", every enum value and every call, sorted."""
    found = []
    for module in pkgutil.iter_modules(axon_ps.wire.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"axon_ps.wire.v1.{module.name}").DESCRIPTOR
            for message in file.message_types_by_name.values():
                found += _of_message(message)
            for enum in file.enum_types_by_name.values():
                found += _of_enum(enum)
            for service in file.services_by_name.values():
                found += [_of_call(service.full_name, method) for method in service.methods]
    return sorted(found)


def reserved() -> set[str]:
    """The numbers that messages do not use again, as "MESSAGE NUMBER"."""
    from google.protobuf.descriptor_pb2 import DescriptorProto

    found = set()
    for message in _messages():
        proto = DescriptorProto()
        message.CopyToProto(proto)
        found |= {f"{message.full_name} {n}" for r in proto.reserved_range for n in range(r.start, r.end)}
    return found


def _messages() -> Iterator[Any]:
    for module in pkgutil.iter_modules(axon_ps.wire.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"axon_ps.wire.v1.{module.name}").DESCRIPTOR
            yield from file.message_types_by_name.values()


def _of_message(message: Any) -> Iterator[str]:
    for field in message.fields:
        of = field.message_type or field.enum_type
        many = "repeated " if field.is_repeated else ""
        yield f"{message.full_name} {field.number} = {many}{of.full_name if of else f'type {field.type}'}"
    for nested in message.nested_types:
        yield from _of_message(nested)


def _of_enum(enum: Any) -> Iterator[str]:
    return (f"{enum.full_name} {value.number} = {value.name}" for value in enum.values)


def _of_call(service: str, method: Any) -> str:
    sides = (
        ("stream " if method.client_streaming else "", method.input_type.full_name),
        ("stream " if method.server_streaming else "", method.output_type.full_name),
    )
    return f"{service} {method.name} = " + " -> ".join(stream + name for stream, name in sides)


if __name__ == "__main__":
    print("\n".join(fields()))
