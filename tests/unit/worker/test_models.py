"""A process has one model of a job, by name."""

from __future__ import annotations

import pytest

from axon_ps.errors import Misuse
from axon_ps.worker.models import Names


def test_a_second_model_of_a_name_is_refused_and_the_message_names_both() -> None:
    names = Names()
    with (
        names.claiming("model 0", "Teacher (15 parameters)"),
        pytest.raises(Misuse, match=r"Student \(1 .*Teacher \(15"),
        names.claiming("model 0", "Student (1 parameter)"),
    ):
        pass
    with pytest.raises(Misuse, match="Teacher"), names.claiming("model 0", "Teacher (15 parameters)"):
        pass
    with names.claiming("student", "Student (1 parameter)"):
        pass


def test_a_model_whose_registration_failed_is_none() -> None:
    names = Names()
    with pytest.raises(ZeroDivisionError), names.claiming("model 0", "Teacher"):
        raise ZeroDivisionError
    with names.claiming("model 0", "Student"):
        pass
    with pytest.raises(Misuse, match="has wrapped Student"), names.claiming("model 0", "Teacher"):
        pass


def test_models_without_a_name_are_numbered_in_the_order_made() -> None:
    names, made = Names(), []
    for name in (None, "teacher", None):
        with names.claiming(name, "Linear (2 parameters)") as chosen:
            made.append(chosen)
    with pytest.raises(ZeroDivisionError), names.claiming(None, "Linear (2 parameters)"):
        raise ZeroDivisionError
    with names.claiming(None, "Linear (2 parameters)") as chosen:
        made.append(chosen)
    assert made == ["model 0", "teacher", "model 2", "model 3"]
    assert list(names) == made
    names.free("teacher")
    with names.claiming("teacher", "another"):
        pass
