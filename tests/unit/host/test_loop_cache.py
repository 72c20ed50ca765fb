"""A record that all loops are compiled counts while what it names is there, and for what it was made."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from axon_ps import kernels
from axon_ps.host import loop_cache
from axon_ps.kernels import rounding
from axon_ps.kernels.compiled import sources_hash

BESIDE = Path(kernels.__file__).with_name("__pycache__")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that NUMBA_CACHE_DIR names, with one loop in it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels_1").mkdir()
    for suffix in ("nbi", "1.nbc"):
        (tmp_path / "kernels_1" / f"loop.abc.{suffix}").touch()
    return tmp_path


def test_a_record_counts_while_all_its_files_are_there(directory: Path) -> None:
    assert loop_cache.folder() == directory
    assert not loop_cache.is_complete()
    loop_cache.record(directory, "abc")
    assert loop_cache.is_complete()
    (directory / "kernels_1" / "loop.abc.1.nbc").unlink()
    assert not loop_cache.is_complete()


def test_a_record_is_not_of_another_setting_of_the_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_cache.record(directory, "abc")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert not loop_cache.is_complete()


@pytest.mark.parametrize("sources", ["", "another"])
def test_nothing_is_recorded_of_other_sources_or_of_nothing(directory: Path, sources: str) -> None:
    (directory / "kernels_1" / "loop.abc.nbi").unlink()
    (directory / "kernels_1" / "loop.abc.1.nbc").unlink()
    loop_cache.record(directory, sources)
    assert not loop_cache.is_complete()


def test_a_record_that_cannot_be_read_is_none(directory: Path) -> None:
    (directory / loop_cache.record_name()).write_text("{", encoding="utf-8")
    assert not loop_cache.is_complete()


def test_the_folder_is_numbas() -> None:
    """Of the loops of this process, which numba has placed by its own rule."""
    assert Path(rounding.convert.stats.cache_path) == loop_cache.folder() == BESIDE


def test_the_folder_is_the_first_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))  # nobody can make that, not even root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loop_cache.folder() == BESIDE
    monkeypatch.setattr(loop_cache, "_PACKAGE", tmp_path / "file")
    assert loop_cache.folder() == tmp_path / "numba"
    assert numba.core.caching.AppDirs(appname="numba", appauthor=False).user_cache_dir == str(tmp_path / "numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert loop_cache.folder() is None
    assert loop_cache.is_complete()  # nothing is to be done before the start


def test_an_empty_folder_is_filled_and_another_one_is_left_alone(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_cache.record(directory, "abc")
    container = tmp_path_factory.mktemp("container") / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(container))
    loop_cache.fill(directory / "not in this image")
    assert not loop_cache.is_complete()
    loop_cache.fill(directory)
    assert loop_cache.is_complete()
    assert {path.name for path in container.rglob("*.*")} == {path.name for path in directory.rglob("*.*")}
    (container / "kernels_1" / "loop.abc.1.nbc").unlink()
    loop_cache.fill(directory)
    assert not loop_cache.is_complete()


def test_names_of_loops_have_the_hash_that_is_recorded() -> None:
    names = [path.name for path in BESIDE.glob("*.nbi")]
    assert [name for name in names if sources_hash(Path(kernels.__file__).parent) in name]
