"""The reason of a group's end, published in its store for ranks whose transport only reports a broken connection.

Invariant: if a rank ends a group by itself, after a time-out, it publishes the reason before it breaks connections. So
the peers of a broken connection find the reason. An end of which every rank is notified anyway (a member has gone) is
not published.
"""

from __future__ import annotations

import contextlib
import threading

from axon_ps.collectives.backends.base import GroupContext
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout

WAIT_S = 0.5
_KINDS: dict[str, type[AxonError]] = {"Timeout": Timeout, "MemberLost": MemberLost}


def publish(context: GroupContext, transport: str, error: AxonError) -> None:
    """Publish the reason. It takes half a second at most; it must not be called on the store's own thread."""

    def put() -> None:
        with contextlib.suppress(AxonError):
            context.store.put(_key(context, transport), f"{type(error).__name__} {error}".encode())

    writer = threading.Thread(target=put, name="axon-ps-reason", daemon=True)
    writer.start()
    writer.join(WAIT_S)


def find(context: GroupContext, transport: str, wait_s: float = WAIT_S) -> AxonError | None:
    """Return another rank's error that ended the group; None if none is published within `wait_s` seconds."""
    try:
        kind, _, text = context.store.wait(_key(context, transport), wait_s).decode().partition(" ")
    except AxonError:
        return None
    return _KINDS.get(kind, Broken)(text)


def _key(context: GroupContext, transport: str) -> str:
    return f"{transport}/{context.name}/reason"
