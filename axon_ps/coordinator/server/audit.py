"""The audit log: all changes of the job, and attempts at one, with the caller. It has JSON lines, in its own file.

    {"time": "2026-01-31T12:00:00.123Z", "job": "gpt", "what": "restore_checkpoint", "who": "worker 3 (node a)",
     "role": "worker", "credentials": "spiffe://axon-ps/job/gpt/worker", "peer": "ipv4:10.0.0.7:40212",
     "about": {"uri": "/checkpoints/step-500"}, "result": "done"}

The line of a call that changes a job (a registration, release, checkpoint, drain or revocation) has the caller and the
result, also when the call is refused. The line of a change of the members has a text about the event. The log has no
reads. It also has no attempts of strangers, who could fill it.

Note: [It does not block]
    A thread writes the lines, so that a hanging disk delays no call. Lines that cannot be written are lost. The
    loss is logged once, lost lines are counted, and a line of the file states their number as soon as lines can be
    written again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from axon_ps.coordinator.server.audit_file import AuditFile
from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.observe.log_buffer import without_credentials
from axon_ps.rpc.auth.credentials import Credentials, calling
from axon_ps.rpc.auth.identity import EVERY_ROLE

OF_MEMBERS: Final = frozenset(("joined", "left", "lost", "finished", "drain", "full", "cut"))
"""Kinds of events of members that are recorded. The rest of the history is in the log already."""

MAX_QUEUED: Final = 4096
"""Most lines queued for the disk; further ones are lost."""

CLOSE_S: Final = 2.0
"""Seconds that the last lines may take."""

STANDARD_ERROR: Final = "-"

_ABOUT: Final = ("uri", "name", "model", "models", "rank", "target")
"""Fields of requests that are recorded as the object of a call."""

_MAX_TEXT: Final = 500

_logger = logging.getLogger(__name__)
S = TypeVar("S", bound="Audited")


class Lines(Protocol):
    """Takes lines."""

    def write(self, line: str) -> None:
        """Append a line; raise `OSError` if that is impossible."""

    def close(self) -> None:
        """Take no more lines."""


class AuditLog:
    """Writes lines, until `close` is called.

    Args:
        path: the file; "-" = standard error; empty = nothing is written.
        secrets: returns the texts that must be in no line.

    Attributes:
        path: the same.
        lost: lines that could not be written.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: str, secrets: Callable[[], Iterable[str]] = tuple) -> None:
        self.path = path
        self._secrets = secrets
        self.lost = 0
        self._reported = 0
        self._file = _opened(path) if path else None
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="axon_ps-audit", daemon=True)
        if self._file is not None:
            self._thread.start()

    def record(self, job: str, what: str, **fields: object) -> None:
        """Have a line written soon. This never raises, and never blocks."""
        if self._file is None:
            return
        given = {n: _short(value) for n, value in fields.items() if value}
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = without_credentials(json.dumps({"time": now, "job": job, "what": what, **given}), self._secrets())
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lose(f"{MAX_QUEUED} lines wait for the disk")

    def close(self) -> None:
        """Write the queued lines, within twice `CLOSE_S`, and end. It is harmless when repeated."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        assert self._file is not None, "there is a thread only if there is something to write to"
        while (line := self._lines.get()) is not None:
            try:
                self._write(self._file, line)
            except OSError as error:
                self._lose(error.strerror or str(error))
        self._file.close()

    def _write(self, file: Lines, line: str) -> None:
        if (missing := self.lost - self._reported) > 0:
            file.write(json.dumps({"what": "lines are missing here", "lines": missing}))
            self._reported += missing
            _logger.warning("the audit log can be written again; %d lines are missing", missing)
        file.write(line)

    def _lose(self, why: str) -> None:
        if self.lost == self._reported:
            _logger.error("the audit log %s cannot be written: %s; the job goes on, lines are lost", self.path, why)
        self.lost += 1


NO_AUDIT: Final = AuditLog("")


def opened(path: str, default: Path, secrets: Callable[[], Iterable[str]]) -> AuditLog:
    """Open the requested log.

    Args:
        path: as of `AuditLog`; empty = `default`. If that cannot be written, standard error is used, with a warning.
        default: a file.
        secrets: as of `AuditLog`.

    Raises:
        ConfigurationError: the requested file cannot be written.
    """
    if path:
        return AuditLog(path, secrets)
    try:
        return AuditLog(str(default), secrets)
    except ConfigurationError as error:
        _logger.warning("%s; until then it goes to standard error", error)
        return AuditLog(STANDARD_ERROR, secrets)


class Audited(Protocol):
    """A servicer whose calls are recorded."""

    @property
    def audit(self) -> AuditLog:
        """The log with its calls."""

    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        """Return the job, and the caller's name in it."""


def audited(perform: Callable[[S, Any, Any], Awaitable[Any]]) -> Callable[[S, Any, Any], Awaitable[Any]]:
    """Record the calls of a servicer's method, with their results."""

    @wraps(perform)
    async def recorded(servicer: S, request: Any, context: Any) -> Any:
        about = {name: str(getattr(request, name)) for name in _ABOUT if hasattr(request, name)}
        with recording(servicer, perform.__name__, request.context.incarnation, context.peer(), about) as found:
            reply = await perform(servicer, request, context)
            if not getattr(reply, "first", True):  # a registration that changed nothing
                found["result"] = ""
            return reply

    return recorded


@contextlib.contextmanager
def recording(
    servicer: Audited, what: str, incarnation: str, peer: str, about: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Record a call that is made in this context.

    Yields:
        The record's `result`, which may be changed; with an empty one nothing is recorded.
    """
    found = {"result": "done"}
    try:
        yield found
    except AxonError as error:
        found["result"] = _failure(error)
        raise
    except BaseException as error:
        found["result"] = f"broken off: {type(error).__name__}"
        raise
    finally:
        if found["result"]:
            job, who = servicer.job_and_name(incarnation)
            who_by = {"who": who, **_by(calling())}
            servicer.audit.record(job, what, **who_by, peer=peer, about=about, result=found["result"])


def refused(servicer: Audited, what: str, credentials: Credentials, peer: str, why: AxonError) -> None:
    """Record that a caller was refused before its call was read."""
    servicer.audit.record(servicer.job_and_name("")[0], what, **_by(credentials), peer=peer, result=_failure(why))


def _by(credentials: Credentials) -> dict[str, str]:
    roles = ", ".join(sorted(role.value for role in credentials.roles))
    return {"role": "any" if credentials.roles == EVERY_ROLE else roles, "credentials": credentials.text}


def _failure(error: AxonError) -> str:
    return f"{type(error).__name__}: {error}"


def _short(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _short(each) for name, each in value.items()}
    return value[:_MAX_TEXT] if isinstance(value, str) else value


class _StandardError:
    def write(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Do nothing: the stream belongs to the process."""


def _opened(path: str) -> Lines:
    if path == STANDARD_ERROR:
        return _StandardError()
    try:
        return AuditFile(path)
    except OSError as error:
        raise ConfigurationError(
            f"the audit log {path} cannot be written: {error.strerror or error}; give --audit-log another file, or - "
            "for standard error"
        ) from error
