"""The audit log: who has changed the job, or tried to. JSON lines of the logger `axon_ps.audit`.

    {"job": "gpt", "what": "restore_checkpoint", "who": "worker 3 (node a)", "peer": "ipv4:10.0.0.7:40212",
     "credentials": "whoever holds the job's secret", "about": {"uri": "/checkpoints/step-500"}, "result": "done"}

Calls that change a job (registrations, releases, checkpoints, drains, revocations) have who made them and what came of
them, also when they are refused; changes of the members have what happened. Reads are not in it.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from axon_ps.errors import AxonError
from axon_ps.rpc.auth.credentials import calling

_ABOUT: Final = ("uri", "name", "model", "models", "rank", "target")
"""Fields of requests that say what a call is about."""

OF_MEMBERS: Final = frozenset(("joined", "left", "lost", "finished", "drain", "full"))
"""What happens to members and is recorded; the rest of the history is in the log already."""

_MAX_TEXT: Final = 500

_logger = logging.getLogger("axon_ps.audit")
S = TypeVar("S", bound="Audited")


class Audited(Protocol):
    """A servicer whose calls are recorded."""

    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        """The job, and what a caller is called in it."""


def record(job: str, what: str, **fields: object) -> None:
    """Write a line."""
    given = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items() if value}
    _logger.info("%s", json.dumps({"job": job, "what": what, **given}))


def audited(perform: Callable[[S, Any, Any], Awaitable[Any]]) -> Callable[[S, Any, Any], Awaitable[Any]]:
    """Record the calls of a servicer's method, and what comes of them."""

    @functools.wraps(perform)
    async def recorded(servicer: S, request: Any, context: Any) -> Any:
        result = "done"
        try:
            reply = await perform(servicer, request, context)
            if not getattr(reply, "first", True):  # a registration that changed nothing
                result = ""
            return reply
        except AxonError as error:
            result = f"{type(error).__name__}: {error}"
            raise
        finally:
            if result:
                job, who = servicer.job_and_name(request.context.incarnation)
                about = {name: str(getattr(request, name))[:_MAX_TEXT] for name in _ABOUT if hasattr(request, name)}
                peer = context.peer() if hasattr(context, "peer") else ""
                credentials = calling().text
                record(job, perform.__name__, who=who, peer=peer, credentials=credentials, about=about, result=result)

    return recorded
