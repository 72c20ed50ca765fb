"""The axon_ps that a process is, and those that go together in one job. Pure.

Note: [Versions]
    A protocol version is raised by whatever would be misunderstood by a process that does not know of it: another
    meaning of a field, another layout of what is cut or summed. What is only added, and is not needed, leaves it.
    Members of one protocol version go together, so that a job is upgraded process by process while it trains. A member
    and its coordinator exchange their builds in Join and Welcome, and the one that knows a reason refuses.

    docs/upgrading.md has the table of what goes with what. `tests/upgrade` compares it with this, and the messages with
    those that the protocol version began with; `make upgrade` upgrades a job that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.version import __version__

PROTOCOL: Final = 1
"""Of this axon_ps. Those that did not say have 0."""

OLDEST: Final = 1
"""The oldest protocol that this axon_ps goes together with."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """The axon_ps that a process is.

    Attributes:
        version: of the package, as text; empty = it does not say.
        protocol: that it speaks; 0 = it does not say.
    """

    version: str = ""
    protocol: int = 0

    def __str__(self) -> str:
        """As errors have it."""
        named = f"axon_ps {self.version}" if self.version else "an older axon_ps"
        return f"{named} (protocol {self.protocol})"


@cache
def ours() -> Build:
    """The build of this process."""
    return Build(version=__version__, protocol=PROTOCOL)


def check(theirs: Build, who: str, us: str) -> None:
    """Check that two processes go together, as far as this one knows.

    Args:
        theirs: the build of the other.
        who: what errors call it.
        us: what errors call this process.

    Raises:
        InvalidRequest: they do not.
    """
    if theirs.protocol < OLDEST:
        raise InvalidRequest(
            f"{who} is {theirs}, and {us} is {ours()}, which goes together with protocol {OLDEST} and later ones: "
            f"start it with a newer axon_ps"
        )
