"""Modules under their old names."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from axon_ps import renamed


@pytest.mark.parametrize("old", renamed.RENAMED)
def test_an_old_name_is_of_the_same_module_and_says_the_new_one(old: str) -> None:
    code = (
        "import importlib, warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        f"    old = importlib.import_module({old!r})\n"
        f"print(old is importlib.import_module({renamed.RENAMED[old]!r}), *(each.message for each in said), sep='|')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"True|{old} is called {renamed.RENAMED[old]} now; import that"


def test_the_warning_is_shown_where_the_old_name_is_imported(recwarn: pytest.WarningsRecorder) -> None:
    exec(compile("import axon_ps.testing.clock", __file__, "exec"))
    (warning,) = recwarn.list
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__


def test_a_module_of_a_renamed_package_is_renamed_with_it() -> None:
    assert renamed.new_name("axon_ps.testing.faults.proxy") == "axon_ps_lab.faults.proxy"
    assert renamed.new_name("axon_ps.testing.faults_of_mine") is None
    assert renamed.new_name("axon_ps.testing") is None


def test_a_module_that_never_was_is_reported_as_everywhere() -> None:
    with (
        pytest.warns(DeprecationWarning, match="axon_ps_lab"),
        pytest.raises(ModuleNotFoundError, match=r"axon_ps_lab\.faults\.nothing"),
    ):
        importlib.import_module("axon_ps.testing.faults.nothing")


def test_no_new_name_is_an_old_one() -> None:
    assert not [new for new in renamed.RENAMED.values() if renamed.new_name(new)]


def test_a_class_has_its_old_name_for_one_release() -> None:
    base = importlib.import_module("axon_ps.collectives.backends.base")
    old, unknown = "Store", "Shop"
    with pytest.warns(DeprecationWarning, match=r"base\.Store is called GroupStore now"):
        assert getattr(base, old) is base.GroupStore
    with pytest.raises(AttributeError, match="no attribute 'Shop'"):
        getattr(base, unknown)
