"""`Held`: what modules keep of a job, which copying them would break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Held(Generic[T]):
    """A group or a world in a module: the same one in the module's deep copies."""

    value: T

    def __deepcopy__(self, memo: dict[int, Any]) -> Held[T]:
        return self
