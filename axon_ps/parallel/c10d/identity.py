"""Identity of our group in torch.distributed: its name, its rank, its devices, its abilities.

Owns: the answers to torch's questions about a group that need no collective, in Python and in C++. Refuses: to
communicate.

Note: [C++ asks, too]
    Our group is a `dist.ProcessGroup` without a C++ backend. The methods of that class ask its backends, and raise an
    error without one ("ProcessGroup name not set"). Python finds our answers by the names of torch's bindings
    (`group_name`), C++ by the names of its virtual functions (`getGroupName`, see torch's PyProcessGroup.hpp), so each
    answer is here under both. tests/unit/parallel/test_c10d_surface.py reads both lists from the installed torch.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_ps_torch import BACKEND

CPU = torch.device("cpu")


class Identity:
    """The answers of `AxonProcessGroup` to torch that need no collective.

    Args:
        rank: our position.
        world_size: number of members.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._name = ""
        self._desc = "undefined"

    @property
    def group_name(self) -> Any:
        """Its name in torch.distributed."""
        return self._name

    @property
    def pg_name(self) -> str:
        """Its name in torch.distributed."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Its description in torch.distributed."""
        return self._desc

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def rank(self) -> int:
        """Return our position."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._world_size

    def name(self) -> str:
        """Return "axon"."""
        return BACKEND

    # C++ calls them by these names.

    getRank, getSize, getBackendName = rank, size, name
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        """Return `group_name`."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return `group_desc`."""
        return self._desc

    # ------------------------------------------------------------------ devices, and what it can do

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]

    # torch asks the group's backend for a device; this group is the backend for all of them.

    def _get_backend(self, device: torch.device) -> Any:
        return self

    get_backend = _get_backend

    def _has_hooks(self) -> bool:
        return False

    supports_splitting = True
    supports_coalescing = True
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_window = False

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: a split concerns its members only."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: backends are made when they are first needed."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: our group numbers its calls from 0 on every rank."""
