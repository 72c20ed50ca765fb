"""observe.logging: one line a record, with time, role and rank; only our own logger is touched."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from axon_ps.observe.logging import ROOT, LogStyle, configure

logger = logging.getLogger("axon_ps.room.module")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    ours = logging.getLogger(ROOT)
    handlers, level, propagate = ours.handlers[:], ours.level, ours.propagate
    yield
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


def test_plain_is_one_line_with_time_role_and_rank() -> None:
    stream = io.StringIO()
    configure("shard", rank=1, style=LogStyle.PLAIN, stream=stream)
    logger.info("first line\nsecond line")
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO shard 1 room\.module: first line\\nsecond line\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_a_traceback_follows_indented() -> None:
    stream = io.StringIO()
    configure("coordinator", style=LogStyle.PLAIN, stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR coordinator room.module: it failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-1] == "    ValueError: broken"


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    identity = configure("worker", style=LogStyle.JSON, level="debug", stream=stream)
    logger.debug("before joining")
    identity.rank = 3
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("after")
    before, after = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (before["role"], before["rank"], before["message"]) == ("worker", None, "before joining")
    assert (after["rank"], after["level"], after["logger"]) == (3, "ERROR", "axon_ps.room.module")
    assert "ValueError: broken" in after["traceback"]


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    configure("run", stream=stream)
    logger.info("hello")
    assert " INFO run room.module: hello" in stream.getvalue()


def test_rich_names_role_and_rank() -> None:
    stream = io.StringIO()
    configure("shard", rank=0, style=LogStyle.RICH, stream=stream)
    logger.warning("hello")
    assert "shard 0: hello" in stream.getvalue()


def test_configuring_again_replaces_and_the_root_logger_is_left_alone() -> None:
    before = logging.getLogger().handlers[:]
    first, second = io.StringIO(), io.StringIO()
    configure("run", style=LogStyle.PLAIN, stream=first)
    configure("run", style=LogStyle.PLAIN, stream=second)
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert logging.getLogger().handlers == before


def test_levels_below_the_one_asked_for_are_dropped() -> None:
    stream = io.StringIO()
    configure("run", style=LogStyle.PLAIN, level="warning", stream=stream)
    logger.info("quiet")
    logger.warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
