"""Classes by name, and the modules of users that add to them.

Only names travel: a job is registered with "adamw", and every process of it makes the optimizer of that name. So every
process that needs a class loads the module of its registration. Users' own processes import it, and servers are told
its name (`--plugins`). A module that an installed package declares as an entry point of `axon_ps.plugins` is loaded
wherever a name is not known yet.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from axon_ps.errors import ConfigurationError, InvalidRequest

ENTRY_POINTS: Final = "axon_ps.plugins"
"""The group of entry points in which a package declares its module."""

_T = TypeVar("_T")
_ClassT = TypeVar("_ClassT", bound=type)


class Registry(Generic[_T]):
    """The classes of one kind by name.

    Args:
        kind: a word for them in messages: "optimizer".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._classes: dict[str, type[_T]] = {}

    def register(self, name: str) -> Callable[[_ClassT], _ClassT]:
        """Return a class decorator that makes the class known as `name`, and sets its attribute `name`.

        A class that is defined again, in a notebook say, replaces the earlier class.

        Raises:
            ConfigurationError: another class has that name, or the name is not printable.
        """
        if not (name and name.isprintable()):
            raise ConfigurationError(f"{name!r} cannot be the name of the {self._kind}; a name must be printable")

        def add(added: _ClassT) -> _ClassT:
            there = self._classes.get(name)
            if there is not None and _path(there) != _path(added):
                raise ConfigurationError(
                    f"{self._kind} {name!r} is {_path(there)} already, so it cannot be {_path(added)}; "
                    "choose another name"
                )
            added.name = name  # type: ignore[attr-defined]
            self._classes[name] = added
            return added

        return add

    def names(self) -> tuple[str, ...]:
        """Return the names registered so far."""
        return tuple(self._classes)

    def choices(self, suits: Callable[[type[_T]], object] = bool) -> tuple[str, ...]:
        """Return the choices that a message lists: the names of classes that suit, and the way to add another one."""
        return (
            *(name for name, known in self._classes.items() if suits(known)),
            "or load the module that registers it in every process of the job: coordinator and shard servers with "
            "--plugins MODULE (or AXON_PS_PLUGINS), workers by importing it",
        )

    def is_known(self, name: str) -> bool:
        """Return True if a class has that name. Installed plugins are loaded before a name counts as unknown.

        Raises:
            ConfigurationError: an installed plugin cannot be loaded.
        """
        if name not in self._classes:
            load_installed()
        return name in self._classes

    def find(self, name: str) -> type[_T]:
        """Return the class of a name.

        Raises:
            InvalidRequest: there is none.
            ConfigurationError: an installed plugin cannot be loaded.
        """
        if not self.is_known(name):
            raise InvalidRequest(f"{self._kind} {name!r} is unknown; use one of {', '.join(self.choices())}")
        return self._classes[name]


def load(modules: Iterable[str]) -> None:
    """Import modules by name, also from the directory where this process was started, and installed plugins.

    Raises:
        ConfigurationError: one cannot be imported.
    """
    for name in modules:
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        _load(name, functools.partial(importlib.import_module, name))
    load_installed()


@functools.cache
def load_installed() -> None:
    """Load the plugins of installed packages, once.

    Raises:
        ConfigurationError: one cannot be imported.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS):
        _load(entry.value, entry.load)


def _load(name: str, load_it: Callable[[], object]) -> None:
    try:
        load_it()
    except Exception as error:
        raise ConfigurationError(
            f"plugin {name!r} cannot be imported ({type(error).__name__}: {error}); give the name of a module that is "
            "installed, on PYTHONPATH, or in the directory where this process is started"
        ) from error


def _path(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"
