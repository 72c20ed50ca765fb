"""A worker that cannot join says why in one line, and every other error is printed as ever."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from axon_ps.errors import AxonError, MemberLost, PermissionDenied
from axon_ps.worker import refusal


def test_only_what_the_starter_has_to_put_right_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error[1]))
    monkeypatch.setattr(refusal, "_hooked", False)
    refused, lost, other = PermissionDenied("a wrong\ntoken"), MemberLost("gone"), PermissionDenied("elsewhere")
    refused.add_note("tried for 3 s")
    for error in (refused, lost):
        refusal.explain(error)
    errors: list[AxonError] = [refused, lost, other]
    for error in errors:
        sys.excepthook(type(error), error, None)
    assert printed == [lost, other]
    line = "axon-ps: this worker could not join its job: a wrong token; tried for 3 s\n"
    assert capsys.readouterr().err == line
