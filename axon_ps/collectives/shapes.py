"""The shapes of collectives' arguments and results: rows by rank, and checks that arrays fit them.

Owns: the checks of a collective's arguments, on this rank alone. A row is an item along the first dimension; a scalar
counts as one row. Every check raises `InvalidRequest`, which `GroupBase.preparing` reports to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.errors import InvalidRequest
from axon_ps.types import DType


def rows(flat: Flat) -> int:
    """Return the number of rows of an array."""
    return flat.shape[0] if flat.shape else 1


def width(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a row."""
    width = 1
    for size in shape[1:]:
        width *= size
    return width


def target(data: Any, out: Any) -> tuple[Any, Flat, Flat | None]:
    """Return the array for a result of the shape of `data`, and the array that must be copied there first."""
    if out is None or out is data:
        return data, arrays.flatten(data), None
    source, flat = arrays.flatten(data, writable=False), arrays.flatten(out, what="out")
    _match(flat, source.shape, source.dtype, source.device)
    return out, flat, source


def out(given: Any, data: Any, flat: Flat, num_rows: int) -> tuple[Any, Flat]:
    """Return the array for a number of rows like those of `data`: the given one, or a new one."""
    shape = (num_rows, *flat.shape[1:])
    if given is None:
        given = arrays.empty_like(data, shape)
        return given, arrays.flatten(given)
    result = arrays.flatten(given, what="out")
    if shape == (1,) and result.shape == ():
        shape = ()
    _match(result, shape, flat.dtype, flat.device)
    return given, result


def counts(given: Sequence[int] | None, each: int, world_size: int) -> tuple[int, ...]:
    """Return rows by rank: the given ones, or `each` for every rank."""
    if given is None:
        return (each,) * world_size
    numbers = tuple(int(c) for c in given)
    if len(numbers) != world_size or any(r < 0 for r in numbers):
        raise InvalidRequest(
            f"the counts are {list(given)}; needed is one number from 0 for each of {world_size} ranks"
        )
    return numbers


def split(total: int, world_size: int) -> tuple[int, ...]:
    """Return rows by rank, as even as possible: the first have one more."""
    return tuple(total // world_size + (r < total % world_size) for r in range(world_size))


def divided(total: int, world_size: int, otherwise: str) -> int:
    """Return each rank's rows when rows are divided equally; the error names the argument to give otherwise."""
    if total % world_size:
        raise InvalidRequest(f"{total} rows do not divide among {world_size} ranks; give {otherwise}")
    return total // world_size


def match_rows(what: str, flat: Flat, needed: int) -> None:
    """Check that an array has `needed` rows."""
    if rows(flat) != needed:
        raise InvalidRequest(f"{what} has {rows(flat)} rows; the counts say {needed}")


def _match(result: Flat, shape: tuple[int, ...], dtype: DType, device: bool) -> None:
    if (result.shape, result.dtype, result.device) != (shape, dtype, device):
        where = "device" if device else "host"
        raise InvalidRequest(
            f"out is {result.dtype.value}{list(result.shape)}; needed is {dtype.value}{list(shape)} in {where} memory"
        )
