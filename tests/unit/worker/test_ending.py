"""A process that ends has finished, or has failed. Tests of `worker/ending.py`."""

from __future__ import annotations

import sys
import threading

import pytest

from axon_ps.worker import ending
from axon_ps.worker.ending import no_error_handled, present_error


@pytest.mark.parametrize(
    ("error", "finished"),
    [
        (ValueError(), False),
        (KeyboardInterrupt(), False),
        (StopIteration(), True),
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(3), False),
        (SystemExit("a message"), False),
    ],
)
def test_a_block_has_finished_unless_an_error_leaves_it(error: BaseException, finished: bool) -> None:
    assert no_error_handled()
    try:
        raise error
    except BaseException:
        assert no_error_handled() is finished


def test_the_error_that_is_handled_is_present_unless_the_user_stopped_the_program() -> None:
    assert present_error() is None
    error = ValueError("broken")
    for raised, present in ((error, error), (KeyboardInterrupt(), None), (SystemExit(1), None)):
        try:
            raise raised
        except BaseException:
            assert present_error() is present


def test_the_error_that_ended_the_main_module_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("broken")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert present_error() is error


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit codes of this test are recorded, as those of a program are."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(ending, "_recording", False)
    monkeypatch.setattr(ending, "_exit_code", None)
    ending.record_exit()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("code", "succeeded"), [(None, True), (0, True), (3, False), ("a message", False)])
def test_a_process_has_succeeded_if_its_last_exit_code_is_0(code: object, succeeded: bool) -> None:
    assert ending.process_succeeded()
    for earlier in (7, code):
        with pytest.raises(SystemExit) as raised:
            sys.exit(earlier)  # type: ignore[arg-type]
        assert raised.value.code == earlier
    assert ending.process_succeeded() is succeeded


@pytest.mark.usefixtures("recorded")
def test_the_exit_code_of_another_thread_does_not_count() -> None:
    def leave() -> None:
        with pytest.raises(SystemExit):
            sys.exit(3)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert ending.process_succeeded()


@pytest.mark.usefixtures("recorded")
def test_an_uncaught_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert not ending.process_succeeded()


@pytest.mark.usefixtures("recorded")
def test_exit_codes_before_a_world_began_do_not_count() -> None:
    recording = sys.exit
    with pytest.raises(SystemExit):
        sys.exit(3)
    ending.record_exit()
    assert ending.process_succeeded()
    assert sys.exit is recording, "it is replaced once"
