"""Addresses that only this machine can reach, and services that only processes of one user can call."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return True if listening on `host` is reachable from this machine only."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_private(host: str, *, token: bool) -> bool:
    """Return True if a service on `host` serves only processes of this machine with the job's token: those of its user.

    Args:
        host: the address that it listens on.
        token: whether it asks for a token.
    """
    return token and is_loopback(host)
