"""The identity of a process: its role in a job, as a SPIFFE ID in its certificate, or as the claims of its token.

    spiffe://axon-ps/job/JOB/ROLE              spiffe://axon-ps/job/JOB/worker/rank/3

Any trust domain is accepted: the trusted authorities decide which domain may sign. An authority of the user's own may
use other names; then a pattern gives the positions of the job and the role in them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from axon_ps.errors import ConfigurationError, PermissionDenied

TRUST_DOMAIN: Final = "axon-ps"
SCHEME: Final = "spiffe://"
MAX_RANK: Final = 1 << 20

_DEFAULT_PATTERN: Final = "spiffe://{domain}/job/{job}/{role}"
_NAME: Final = r"[A-Za-z0-9._-]+"
_FIELDS: Final = {"domain": r"[a-z0-9._-]+", "job": _NAME, "role": r"[a-z]+", "rank": r"0|[1-9][0-9]{0,6}"}


class Principal(enum.Enum):
    """A role, which credentials give to a process. `access` is the table of the calls that each may make."""

    COORDINATOR = "coordinator"
    SHARD = "shard"
    WORKER = "worker"
    OPERATOR = "operator"
    OBSERVER = "observer"


EVERY_ROLE: Final = frozenset(Principal)
SERVICES: Final = frozenset({Principal.COORDINATOR, Principal.SHARD})
ANY_SERVICE: Final = "service.axon-ps.internal"
"""A name in the certificates of both services, for clients that do not know which of the two they call."""


@dataclass(frozen=True)
class Identity:
    """A role in a job.

    Attributes:
        role: the role.
        job: name of the job.
        rank: the rank that a worker or shard server must have; None = any.
    """

    role: Principal
    job: str
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.role.value}{rank} of job {self.job!r}"

    def uri(self) -> str:
        """Return its SPIFFE ID.

        Raises:
            ConfigurationError: the job's name cannot be in a SPIFFE ID.
        """
        if not re.fullmatch(_NAME, self.job):
            raise ConfigurationError(
                f"the job's name {self.job!r} cannot be in a certificate; use letters, digits, '.', '_' and '-'"
            )
        rank = "" if self.rank is None else f"/rank/{self.rank}"
        return f"{SCHEME}{TRUST_DOMAIN}/job/{self.job}/{self.role.value}{rank}"


def server_name(role: Principal) -> str:
    """Return the DNS name in a certificate by which a client verifies the server's role, at any address."""
    return f"{role.value}.axon-ps.internal"


def identity_of(uri: str, pattern: str = "") -> Identity:
    """Return the identity that a SPIFFE ID names.

    Args:
        uri: the SPIFFE ID.
        pattern: the form of the authority's SPIFFE IDs, with `{role}`; `{job}`, `{rank}`, `{domain}` if they are in it
            ("spiffe://example.org/ns/{job}/sa/axon-{role}"); empty = the form of the module's docstring.

    Raises:
        PermissionDenied: it has another form, or does not name a role of axon_ps.
        ConfigurationError: the pattern is malformed.
    """
    if (match := _expression(pattern or _DEFAULT_PATTERN).fullmatch(uri)) is None:
        form = pattern or f"{SCHEME}DOMAIN/job/JOB/ROLE[/rank/N]"
        raise PermissionDenied(f"the certificate's name {uri[:200]!r} is not of the form {form}")
    found = match.groupdict()
    rank = found.get("rank")
    return Identity(role_of(found["role"], uri), found.get("job") or "", int(rank) if rank else None)


def role_of(name: str, where: str) -> Principal:
    """Return the role of a name.

    Raises:
        PermissionDenied: no role has that name.
    """
    try:
        return Principal(name)
    except ValueError:
        roles = ", ".join(p.value for p in Principal)
        raise PermissionDenied(f"{where[:200]!r} names the role {name[:40]!r}; the roles are {roles}") from None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    literals_and_names = re.split(r"\{(\w*)\}", pattern)
    names = literals_and_names[1::2]
    if (
        not pattern.startswith(SCHEME)
        or "role" not in names
        or set(names) - set(_FIELDS)
        or len(set(names)) < len(names)
    ):
        raise ConfigurationError(
            f"the SPIFFE pattern {pattern!r} must begin with {SCHEME} and have {{role}} once, and may have {{job}}, "
            "{rank} and {domain} once"
        )
    text = "".join(
        f"(?P<{each}>{_FIELDS[each]})" if i % 2 else re.escape(each) for i, each in enumerate(literals_and_names)
    )
    return re.compile(text + ("" if "rank" in names else r"(?:/rank/(?P<rank>0|[1-9][0-9]{0,6}))?"))
