"""Renamed modules: an old name works for one release, with a `DeprecationWarning`.

Owns: the table of old names. Python consults the table before it searches folders, because old folders may remain in
a checkout, without sources.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

RENAMED: Final = {
    "axon_ps.cli.chaos": "axon_ps_lab.commands.chaos",
    "axon_ps.cli.measure": "axon_ps_lab.commands.measure",
    "axon_ps.cli.simulate": "axon_ps_lab.commands.simulate",
    "axon_ps.collectives.backend": "axon_ps.collectives.backends.base",
    "axon_ps.collectives.group": "axon_ps.collectives.process_group",
    "axon_ps.collectives.grpc_backend": "axon_ps.collectives.backends.grpc",
    "axon_ps.collectives.hierarchical": "axon_ps.collectives.backends.hierarchical.backend",
    "axon_ps.collectives.mock": "axon_ps.collectives.backends.mock",
    "axon_ps.collectives.nccl": "axon_ps.collectives.backends.nccl.backend",
    "axon_ps.collectives.shm": "axon_ps.collectives.backends.shm.backend",
    "axon_ps.collectives.torch_gloo": "axon_ps.collectives.backends.gloo",
    "axon_ps.rpc.bulk": "axon_ps.rpc.carriers.bulk",
    "axon_ps.rpc.in_process": "axon_ps.rpc.carriers.in_process",
    "axon_ps.simulate": "axon_ps_lab.simulate",
    "axon_ps.testing.chaos": "axon_ps_lab.chaos",
    "axon_ps.testing.clock": "axon_ps_lab.clock",
    "axon_ps.testing.conformance": "axon_ps_lab.conformance",
    "axon_ps.testing.device": "axon_ps_lab.device",
    "axon_ps.testing.etcd": "axon_ps_lab.etcd",
    "axon_ps.testing.faults": "axon_ps_lab.faults",
}
"""New names of modules and packages, by the old ones. The modules of a package are renamed with it."""


class Renamed(MetaPathFinder, Loader):
    """Finds a module by its old name. Both names give the same module, so its classes are the same, too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module by its old name; None for every other name."""
        if (now := new_name(name)) is None:
            return None
        warnings.warn(f"{name} is called {now} now; import that", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that Python has made by the module of the new name."""
        name = module.__name__
        now = new_name(name)
        assert now is not None
        sys.modules[name] = importlib.import_module(now)


def new_name(name: str) -> str | None:
    """Return the present name of a module; None if it has not been renamed."""
    package = name
    while package not in RENAMED:
        package, _, _ = package.rpartition(".")
        if not package:
            return None
    return RENAMED[package] + name.removeprefix(package)


def install() -> None:
    """Let Python find modules by their old names, once."""
    if not any(isinstance(finder, Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, Renamed())
