"""Why a group ended, left in its store: for ranks whose transport says only that a connection broke.

Invariant: a rank that ends a group by itself, because it waited in vain, leaves the reason before it breaks
connections, so who sees one break finds it. What every rank is told anyway (a member has gone) is not left here.
"""

from __future__ import annotations

import contextlib
import threading

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout

WAIT_S = 0.5
_KINDS: dict[str, type[AxonError]] = {"Timeout": Timeout, "MemberLost": MemberLost}


def leave(context: GroupContext, transport: str, error: AxonError) -> None:
    """Leave the reason. Takes half a second at most; not for the thread that the store works on."""

    def put() -> None:
        with contextlib.suppress(AxonError):
            context.store.put(_key(context, transport), f"{type(error).__name__} {error}".encode())

    writer = threading.Thread(target=put, name="axon-ps-reason", daemon=True)
    writer.start()
    writer.join(WAIT_S)


def find(context: GroupContext, transport: str, wait_s: float = WAIT_S) -> AxonError | None:
    """The error that another rank ended the group with; None when none says so within `wait_s` seconds."""
    try:
        kind, _, text = context.store.wait(_key(context, transport), wait_s).decode().partition(" ")
    except AxonError:
        return None
    return _KINDS.get(kind, Broken)(text)


def _key(context: GroupContext, transport: str) -> str:
    return f"{transport}/{context.name}/reason"
