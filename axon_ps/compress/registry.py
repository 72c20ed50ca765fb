"""Compressors by name. Importing this imports no numba."""

from __future__ import annotations

import dataclasses

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InvalidRequest
from axon_ps.plugins import Registry

_REGISTRY: Registry[Compressor] = Registry("compressor")

register = _REGISTRY.register
names = _REGISTRY.names
choices = _REGISTRY.choices
is_known = _REGISTRY.is_known


def compressor(name: str, **options: float) -> Compressor:
    """Return the compressor of that name.

    Args:
        name: "int8" (option `block_numel`), "int4", "top_k" (option `fraction`), "block_top_k" (options `fraction`,
            `bits`), "bf16", "fp16", "float8_e4m3" (option `rest_bits`), or the name of a plugin's compressor.
        options: fields of its dataclass. Those not given have their defaults.

    Raises:
        InvalidRequest: there is no such compressor, it has no such option, or a value is out of range.
    """
    kind = _REGISTRY.find(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(options.keys() - fields):
        raise InvalidRequest(
            f"compressor {name!r} does not take {', '.join(unknown)}; its options are {', '.join(fields) or 'none'}"
        )
    return kind(**{option: _number(name, fields[option], value) for option, value in options.items()})


def _number(name: str, field: dataclasses.Field[object], value: float) -> float:
    """Return the value of an option. An integer's arrives from the wire as a float."""
    if not isinstance(value, (int, float)):
        raise InvalidRequest(f"option {field.name} of compressor {name!r} is {value!r}; it must be a number")
    if field.type not in (int, "int"):
        return float(value)
    if not float(value).is_integer():  # false for inf and nan, too
        raise InvalidRequest(f"option {field.name} of compressor {name!r} is {value}; it must be an integer")
    return int(value)
