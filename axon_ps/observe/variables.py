"""The environment variables that axon_ps reads, by name, and the detection of misspelt ones. It is pure.

docs/environment.md describes each; a test checks that the list, the page and the code agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from axon_ps.texts import suggestion

PREFIX: Final = "AXON_PS_"

KNOWN: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ADVERTISE", "ALLOW_PICKLE", "AUDIT_LOG", "BACKEND", "BIT_FLIPS", "BULK_PORT", "CHECKPOINT_DIR",
        "CHECKPOINT_KEY_FILE", "CHECKPOINT_ROOTS", "CONFIG", "COORDINATOR", "DEBUGGABLE", "DIRECT_MEMORY", "DRAIN_S",
        "HTTP_HOST", "HTTP_PORT", "INSECURE", "JOB", "LOG", "LOG_LEVEL", "MEMORY_GB", "NODE", "OBSERVER_TOKEN",
        "OBSERVER_TOKEN_FILE", "PLUGINS", "SHARDS", "SPIFFE_PATTERN", "STANDBY", "TLS", "TLS_CA", "TLS_CERT", "TLS_DIR",
        "TLS_KEY", "TLS_LIFETIME_S", "TLS_MUTUAL", "TOKEN", "TOKEN_FILE", "TRACE_EVERY",
    )
)  # fmt: skip

_ALIKE: Final = 0.85
"""Minimum similarity of a misspelling; AXON_PS_COORDINATOR_PORT, which Kubernetes sets for a service, is below it."""


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Return the names that are probably misspelt, each with a message that asks for the probable name.

    Args:
        names: names of environment variables.
    """
    found: dict[str, str] = {}
    for name in names:
        unknown = name.startswith(PREFIX) and name not in KNOWN
        if unknown and (meant := suggestion(name, sorted(KNOWN), prefix=PREFIX, min_similarity=_ALIKE)):
            found[name] = f"{name} is set, and nothing reads it{meant}"
    return found
