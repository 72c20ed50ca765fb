"""A process has one model of a job, by name."""

from __future__ import annotations

import pytest

from axon_ps.collectives.models import Models
from axon_ps.errors import Misuse


def test_a_second_model_of_a_name_is_refused_and_the_message_names_both() -> None:
    models = Models()
    with (
        models.registering("Teacher (15 parameters)"),
        pytest.raises(Misuse, match=r"Student \(1 .*Teacher \(15"),
        models.registering("Student (1 parameter)"),
    ):
        pass
    with pytest.raises(Misuse, match="Teacher"), models.registering("Teacher (15 parameters)"):
        pass
    with models.registering("Student (1 parameter)", "student"):
        pass


def test_a_model_whose_registration_failed_is_none() -> None:
    models = Models()
    with pytest.raises(ZeroDivisionError), models.registering("Teacher"):
        raise ZeroDivisionError
    with models.registering("Student"):
        pass
    with pytest.raises(Misuse, match="has wrapped Student"), models.registering("Teacher"):
        pass
