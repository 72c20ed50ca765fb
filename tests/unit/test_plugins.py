"""Names of users' classes: registering them, finding them, loading the modules and packages that they are in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from axon_ps import plugins
from axon_ps.errors import ConfigurationError, InvalidRequest
from axon_ps.plugins import Registry


class Thing:
    name: ClassVar[str]


class Other(Thing):
    pass


@pytest.fixture
def things() -> Registry[Thing]:
    return Registry("thing")


def test_a_registered_class_has_its_name(things: Registry[Thing]) -> None:
    assert things.register("a")(Other) is Other
    assert (things.find("a"), things.names(), Other.name) == (Other, ("a",), "a")


def test_a_class_that_is_defined_again_replaces_the_one_before(things: Registry[Thing]) -> None:
    for _ in range(2):

        @things.register("a")
        class Again(Thing):
            pass

        assert things.find("a") is Again


def test_a_name_that_is_taken_or_cannot_travel_is_refused(things: Registry[Thing]) -> None:
    things.register("a")(Thing)
    with pytest.raises(
        ConfigurationError, match=r"thing 'a' is \S+\.Thing already, .* \S+\.Other; choose another name"
    ):
        things.register("a")(Other)
    for name in ("", "a\n"):
        with pytest.raises(ConfigurationError, match="must be printable"):
            things.register(name)
    assert things.find("a") is Thing


def test_an_unknown_name_says_what_to_do(things: Registry[Thing]) -> None:
    things.register("a")(Thing)
    with pytest.raises(InvalidRequest, match="thing 'b' is unknown; use one of a, or load .* --plugins MODULE"):
        things.find("b")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    plugins.load_installed.cache_clear()
    return tmp_path


def test_a_module_is_found_where_the_process_was_started(directory: Path) -> None:
    (directory / "plugin_here.py").write_text("value = 7\n")
    plugins.load(["plugin_here"])
    assert sys.modules.pop("plugin_here").value == 7


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No module named 'plugin_bad'"), ("1 / 0\n", "ZeroDivisionError: division by zero")]
)
def test_a_module_that_cannot_be_imported_is_named(directory: Path, content: str | None, words: str) -> None:
    if content:
        (directory / "plugin_bad.py").write_text(content)
    with pytest.raises(ConfigurationError, match=f"plugin 'plugin_bad' cannot be imported .*{words}"):
        plugins.load(["plugin_bad"])


def install(directory: Path, module: str) -> None:
    """What pip leaves of a package whose module is a plugin."""
    info = directory / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.ENTRY_POINTS}]\n{module} = {module}\n")
    sys.path.append(str(directory))


def test_an_installed_package_is_loaded_when_a_name_is_unknown(directory: Path, things: Registry[Thing]) -> None:
    sys.modules["plugin_registry"] = type(sys)("plugin_registry")
    sys.modules["plugin_registry"].things = things  # type: ignore[attr-defined]
    (directory / "plugin_installed.py").write_text(
        "from plugin_registry import things\n@things.register('installed')\nclass Installed:\n    pass\n"
    )
    install(directory, "plugin_installed")
    assert things.find("installed").__module__ == "plugin_installed"
    del sys.modules["plugin_registry"], sys.modules["plugin_installed"]


def test_an_installed_package_that_cannot_be_loaded_is_named(directory: Path, things: Registry[Thing]) -> None:
    install(directory, "plugin_gone")
    with pytest.raises(ConfigurationError, match="plugin 'plugin_gone' cannot be imported"):
        things.find("anything")
