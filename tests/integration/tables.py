"""Tables that tests fill row by row; the end of a run prints them, whichever process ran the test.

A row travels as a property of the test's report (`record_property`), so it is there only if the test got that far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

PARITY = "Distance from single-process torch, largest ||a - b|| / ||b|| of a parameter"
_PREFIX = "table: "
Record = Callable[[str, object], None]


def add(record: Record, table: str, **columns: object) -> None:
    """Add a row to a table.

    Args:
        record: the fixture `record_property` of the test.
        table: its title.
        columns: their names and values, in order, the same names in every row.
    """
    record(_PREFIX + table, {name.replace("_", " "): str(value) for name, value in columns.items()})


def shown(properties: Iterable[tuple[str, Any]]) -> list[str]:
    """Lines that show the tables among the properties of reports."""
    rows: dict[str, list[dict[str, str]]] = {}
    for name, value in properties:
        if name.startswith(_PREFIX):
            rows.setdefault(name.removeprefix(_PREFIX), []).append(value)
    lines = []
    for title, of_table in rows.items():
        names = list(dict.fromkeys(name for row in of_table for name in row))
        cells = [names, *([row.get(name, "") for name in names] for row in of_table)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", title, ""]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return lines
