"""Findings of the fuzzer, and the files that repeat them.

A finding is a traceback that a service logs, a status of an unforeseen exception (INTERNAL, UNKNOWN), an error
that is not of our tree, a task of an event loop that fails unseen, a call that does not end, a process that dies.
"""

from __future__ import annotations

import base64
import json
import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """The messages that were sent, in order.

    Attributes:
        target: the target that it is for.
        what: an RPC's path, a decoder, or an action of the worker.
        messages: the encoded messages.
        facts: the job's names at that time; in a replay they are exchanged for those of the new job.
        replies: worker's half: the reply that each message replaced: the RPC's path with the kind of reply, and the
            number of earlier replies of that kind in the same call.
    """

    target: str
    what: str
    messages: tuple[bytes, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    replies: tuple[tuple[str, int], ...] = ()

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        encoded = [base64.b64encode(m).decode() for m in self.messages]
        content: dict[str, Any] = {"target": self.target, "what": self.what, "facts": self.facts, "messages": encoded}
        content |= {"replies": self.replies} if self.replies else {}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read a case that `write` has written."""
        c = json.loads(path.read_text(encoding="utf-8"))
        replies = tuple((path, int(number)) for path, number in c.get("replies", ()))
        return cls(c["target"], c["what"], tuple(map(base64.b64decode, c["messages"])), c["facts"], replies)

    def among(self, facts: dict[str, str]) -> Case:
        """Return the same case for another job: with its incarnations, which are as long."""
        messages = self.messages
        for name, value in self.facts.items():
            new = facts.get(name, value).encode()
            if len(new) == len(value):
                messages = tuple(m.replace(value.encode(), new) for m in messages)
        return Case(self.target, self.what, messages, facts, self.replies)


class Findings:
    """The findings, each kind once.

    Args:
        directory: the directory of the cases.
    """

    def __init__(self, directory: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.directory = directory

    def add(self, what: str, cases: list[Case], text: str = "") -> None:
        """Count a finding; write its cases if it is the first of its kind."""
        self.counts[what] += 1
        if what in self.texts:
            return
        self.texts[what] = text
        self.directory.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(cases):
            case.write(self.directory / f"finding{len(self.texts)}-{number}.json")

    def take(self, others: dict[str, tuple[int, str]]) -> None:
        """Add the findings of another process, which has written its cases."""
        for what, (count, text) in others.items():
            self.counts[what] += count
            self.texts.setdefault(what, text)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        return "\n".join(f"{count} x {what}\n{self.texts[what]}" for what, count in self.counts.items())


class LoggedTracebacks(logging.Handler):
    """Collects the tracebacks that axon_ps, asyncio or gRPC log."""

    LOGGERS = ("axon_ps", "asyncio", "grpc")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append((where(record.exc_info[1]), _text(record.exc_info[1])))

    def __enter__(self) -> LoggedTracebacks:
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def take(self) -> list[tuple[str, str]]:
        """Return the tracebacks since the last call, each with its location."""
        found, self.found = self.found, []
        return found


def where(error: BaseException) -> str:
    """Return an error's class and its location in the code: findings that share both are one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "axon_ps" in f.filename] or frames[-1:]
    location = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "nowhere"
    return f"{type(error).__name__} in {location}"


def _text(error: Any) -> str:
    return "".join(traceback.format_exception(error))[-4000:]
