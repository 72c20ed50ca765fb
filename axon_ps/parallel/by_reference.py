"""`ByReference`: a value that deep copies of a module share. A process group, for example, cannot be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ByReference(Generic[T]):
    """A group or a world in a module: the same object in the module's deep copies."""

    value: T

    def __deepcopy__(self, memo: dict[int, Any]) -> ByReference[T]:
        return self
