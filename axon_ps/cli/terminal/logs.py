"""The records of a job's log as its coordinator gives them, printed as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from axon_ps.cli.operations import client
from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal.feed import PASSING, PATIENCE_S
from axon_ps.cli.terminal.log_view import Wanted, as_dict, line
from axon_ps.wire.v1 import logs_pb2

WAIT_S: Final = 5.0
"""Seconds that the coordinator waits for a record before it answers that there is none."""

AGAIN_S: Final = 0.5
"""Seconds until a coordinator that does not answer is called again."""


async def show_logs(settings: Settings, wanted: Wanted, *, follow: bool, as_json: bool) -> None:
    """Print the wanted records; see `_records`."""
    colour = sys.stdout.isatty()
    async with contextlib.aclosing(_records(settings, follow=follow)) as batches:
        async for batch in batches:
            for record in filter(wanted.has, batch):
                print(json.dumps(as_dict(record)) if as_json else line(record, colour=colour))
            sys.stdout.flush()


async def _records(settings: Settings, *, follow: bool) -> AsyncGenerator[Sequence[logs_pb2.LogRecord], None]:
    """Yield the records that are there and, if `follow`, new ones until the job has finished; batches are by time.

    Missing records are reported on standard error. A coordinator that does not answer is called again for a while.

    Raises:
        AxonError: the coordinator has never answered, refuses, or was silent for too long.
    """
    history, after, batch, silent_since = "", 0.0, list[logs_pb2.LogRecord](), 0.0
    async with client(settings) as operator:
        while True:
            try:
                reply = await operator.logs(history, after, WAIT_S if history else 0.0)
            except PASSING as error:
                if not history or (silent_since and time.monotonic() - silent_since >= PATIENCE_S):
                    raise
                if not silent_since:
                    silent_since = time.monotonic()
                    _warn(f"no answer, trying again: {error}")
                await asyncio.sleep(AGAIN_S)
                continue
            if reply.history != history:
                _warn_of_beginning(reply, again=bool(history))
                after = 0.0
            batch += reply.records
            history, after = reply.history, reply.records[-1].number if reply.records else after
            silent_since = 0.0
            if reply.more:
                continue
            yield sorted(batch, key=lambda record: record.at_s)
            batch = []
            if reply.finished or not follow:
                return


def _warn_of_beginning(reply: logs_pb2.LogsReply, *, again: bool) -> None:
    if again:
        _warn("the coordinator has begun a new log; it does not know what was logged before it led")
    elif reply.dropped:
        _warn(f"{reply.dropped:.0f} older records are not there any more")


def _warn(text: str) -> None:
    print(f"axon-ps: {text}", file=sys.stderr)
