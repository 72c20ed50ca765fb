"""The records of this process that go to the job's log: bounded, without secrets, and nobody else misses one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from axon_ps.observe import log_buffer
from axon_ps.observe.log_buffer import MAX_RECORDS, MAX_TEXT, TAKEN, TAKEN_CHARACTERS, LogBuffer, collect

logger = logging.getLogger("axon_ps.test_log_buffer")


@pytest.fixture
def buffer() -> Iterator[LogBuffer]:
    made = collect(["top-secret", ""])
    assert made is not None
    yield made
    made.close()


def test_records_are_given_once_in_order(buffer: LogBuffer) -> None:
    logger.warning("first %d", 1)
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("second")
    (first, second), dropped = buffer.take()
    assert (first.text, first.level, first.logger, dropped) == ("first 1", 30, logger.name, 0)
    assert second.text.startswith("second\nTraceback")
    assert second.text.endswith("ValueError: no")
    assert buffer.take() == ([], 0)


def test_a_flood_is_bounded_and_counted(buffer: LogBuffer) -> None:
    for number in range(MAX_RECORDS + 100):
        logger.warning("%d", number)
    taken, dropped = buffer.take()
    assert (len(taken), dropped, taken[0].text) == (TAKEN, 100, "100")  # the newest stay
    while taken:
        newest, (taken, dropped) = taken[-1], buffer.take()
        assert dropped == 0
    assert newest.text == str(MAX_RECORDS + 99)


def test_long_texts_are_bounded(buffer: LogBuffer) -> None:
    for _ in range(5):
        logger.warning("begin%send", "x" * 10 * MAX_TEXT)
    taken, _ = buffer.take()
    assert all(len(r.text) <= MAX_TEXT and r.text.startswith("begin") and r.text.endswith("end") for r in taken)
    assert sum(len(r.text) for r in taken) <= TAKEN_CHARACTERS + MAX_TEXT


def test_no_secret_is_given(buffer: LogBuffer) -> None:
    logger.warning("the token is top-secret, the store s3://key:pass@bucket/x, the header Bearer abc.def")
    buffer.failed(RuntimeError("top-secret"))
    taken, _ = buffer.take()
    text = "".join(record.text for record in taken)
    for secret in ("top-secret", "key", "pass", "abc"):
        assert secret not in text
    assert "s3://***@bucket/x" in text


def test_one_of_a_process_collects(buffer: LogBuffer) -> None:
    assert collect() is None
    buffer.close()
    logger.warning("nobody collects this")
    again = collect()
    assert again is not None
    again.close()
    assert again.take() == buffer.take() == ([], 0)


def test_what_pythons_last_resort_prints_is_still_printed(
    buffer: LogBuffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    logging.getLogger("axon_ps.worker").warning("something is wrong")
    assert capsys.readouterr().err == "something is wrong\n"
    logging.getLogger().addHandler(logging.NullHandler())
    logger.warning("the program's handlers decide")
    assert capsys.readouterr().err == ""


def test_debugging_stays_here(buffer: LogBuffer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "axon_ps"):
        logger.debug("much")
    assert buffer.take() == ([], 0)
    assert log_buffer.ROOT == "axon_ps"
