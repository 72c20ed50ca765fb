"""The version of axon_ps of a process, and the versions that are compatible in one job. Pure.

Note: [Versions]
    The protocol version grows with each change that an older process would misunderstand: another meaning of a field,
    another layout of slices or sums. It stays the same with an optional addition. Members of one protocol version are
    compatible, so that a job can be upgraded process by process while it trains. A member and its coordinator exchange
    their builds in Join and Welcome, and the side that finds an incompatibility refuses.

    docs/upgrading.md has the table of compatible versions. `tests/upgrade` compares it with this, and the messages with
    those at the start of the protocol version. `make lab NAME=upgrade` upgrades a job that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.version import __version__

PROTOCOL: Final = 1
"""The protocol version of this axon_ps. Builds that did not report one have 0."""

OLDEST: Final = 1
"""The oldest protocol version that is compatible with this axon_ps."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """The version of axon_ps of a process.

    Attributes:
        version: the package's version, as text; empty = not reported.
        protocol: the protocol version; 0 = not reported.
    """

    version: str = ""
    protocol: int = 0

    def __str__(self) -> str:
        """Return the text for errors."""
        named = f"axon_ps {self.version}" if self.version else "an older axon_ps"
        return f"{named} (protocol {self.protocol})"


@cache
def ours() -> Build:
    """Return the build of this process."""
    return Build(version=__version__, protocol=PROTOCOL)


def check(theirs: Build, who: str, us: str) -> None:
    """Check that two processes are compatible, as far as this one knows.

    Args:
        theirs: the build of the other process.
        who: the name of the other process in errors.
        us: the name of this process in errors.

    Raises:
        InvalidRequest: they are not.
    """
    if theirs.protocol < OLDEST:
        raise InvalidRequest(
            f"{who} is {theirs}, and {us} is {ours()}, which goes together with protocol {OLDEST} and later ones: "
            f"start it with a newer axon_ps"
        )
