"""The newest log records of this process, which its session sends to the job's log.

It has the records of axon_ps from INFO on that pass the levels of their loggers, and the failure of a training script.
It does not have a script's output, nor the records of its own loggers. A script whose record belongs in the job's log
uses a child of "axon_ps", such as "axon_ps.train".

Memory is bounded: `MAX_RECORDS` of `MAX_TEXT` characters. When it is full the oldest are dropped, and counted. The
records from `take` have no secrets: tokens of this process, and credentials in URIs and headers, are removed.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from axon_ps.observe.logging import ROOT

MAX_RECORDS: Final = 256
MAX_TEXT: Final = 8000
"""Characters of a record's text. The middle of a longer text is left out: a traceback's end has the error."""

TAKEN: Final = 32
TAKEN_CHARACTERS: Final = 16_000
"""Once its records have this many characters, `take` adds no further one."""

_REMOVED: Final = "***"
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=Bearer )[^\s\"']+|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}")
"""Credentials in URIs and in headers, and JWT, which begin with `{"` in base64."""

_claiming = threading.Lock()


@dataclass(frozen=True)
class Logged:
    """A record.

    Attributes:
        at_s: its time, in seconds since 1970.
        level: a level of Python's logging: 30 = warning.
        logger: the logger's name.
        text: the message, and a traceback below it.
    """

    at_s: float
    level: int
    logger: str
    text: str


class LogBuffer(logging.Handler):
    """The records that were not taken yet. `collect` makes one; any thread may use it.

    Args:
        secrets: texts that are removed from every record.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__(logging.INFO)
        self._records: deque[Logged] = deque()
        self._dropped = 0
        self._lock = self.lock or threading.RLock()  # the handler's own, which is free after a fork
        self._secrets = tuple(secrets)
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record."""
        text = self.format(record)
        with self._lock:
            self._add(Logged(record.created, record.levelno, record.name, text))
        if self._is_the_only_one(record.name) and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)  # as if this handler were not there

    def failed(self, error: BaseException) -> None:
        """Add the traceback of a script that has failed, for the job's log. Python prints it here."""
        text = f"the script has failed\n{''.join(traceback.format_exception(error)).rstrip()}"
        with self._lock:
            self._add(Logged(time.time(), logging.ERROR, "script", text))

    def take(self) -> tuple[list[Logged], int]:
        """Remove and return some of the oldest records, and the number of records dropped since the last call."""
        taken: list[Logged] = []
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            while self._records and len(taken) < TAKEN and sum(len(r.text) for r in taken) < TAKEN_CHARACTERS:
                taken.append(self._records.popleft())
        return [replace(record, text=self._cleaned(record.text)) for record in taken], dropped

    def close(self) -> None:
        """Collect no more records; those that are there can still be taken."""
        logging.getLogger(ROOT).removeHandler(self)
        super().close()

    def _add(self, record: Logged) -> None:
        if len(record.text) > MAX_TEXT:
            end = MAX_TEXT * 3 // 4
            record = replace(record, text=f"{record.text[: MAX_TEXT - end - 5]} ... {record.text[-end:]}")
        if len(self._records) == MAX_RECORDS:
            self._records.popleft()
            self._dropped += 1
        self._records.append(record)

    def _is_the_only_one(self, name: str) -> bool:
        """Return True if no other handler gets the records of a logger."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True

    def _cleaned(self, text: str) -> str:
        return without_credentials(text, self._secrets)


def without_credentials(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without these secrets, the credentials in URIs and headers, and tokens of roles."""
    for secret in filter(None, secrets):
        text = text.replace(secret, _REMOVED)
    return _CREDENTIALS.sub(_REMOVED, text)


def collect(secrets: Iterable[str] = ()) -> LogBuffer | None:
    """Return a buffer that gets the records of axon_ps in this process, until its `close`; None if another one does."""
    logger = logging.getLogger(ROOT)
    with _claiming:
        if any(isinstance(handler, LogBuffer) for handler in logger.handlers):
            return None
        buffer = LogBuffer(secrets)
        logger.addHandler(buffer)
        return buffer
