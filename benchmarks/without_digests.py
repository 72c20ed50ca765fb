"""A plugin of shard servers, for `digests.py`: no digests are taken or compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from axon_ps.compress import cast
from axon_ps.optim.base import UpdateRule
from axon_ps.shard.core.digests import ArrayDigests


def _nothing(*_: Any) -> None: ...


def _none(*_: Any) -> Iterator[Any]:
    return iter(())


def _first(count: int, loop: Callable[..., Any]) -> Callable[..., Any]:
    """Make a loop that gets its first arguments alone, without digests."""
    return lambda *arguments, **options: loop(*arguments[:count], **options)


for name in ("record", "record_digests"):
    setattr(ArrayDigests, name, _nothing)
for name in ("check", "check_digests"):
    setattr(ArrayDigests, name, _none)
for name in ("accumulate", "accumulate_last"):
    setattr(cast, name, _first(4, getattr(cast, name)))
UpdateRule.apply = _first(9, UpdateRule.apply)  # type: ignore[method-assign]
