"""`Notes`: the lines of JSON that processes append to files, read as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Notes:
    """Reads files that other processes append lines to; a line that is not complete yet is read later."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def new(self, path: Path) -> list[Any]:
        """Return the values of the lines since the last call, none if there is no such file yet."""
        if not path.exists():
            return []
        begin = self._offsets.get(path, 0)
        with open(path, "rb") as file:
            file.seek(begin)
            lines = file.read().split(b"\n")[:-1]
        self._offsets[path] = begin + sum(len(line) + 1 for line in lines)
        return [json.loads(line) for line in lines]
