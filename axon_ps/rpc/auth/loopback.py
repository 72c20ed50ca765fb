"""Addresses that only this machine can reach, and only processes that know the job's token."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether listening on `host` is reachable from this machine only."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_private(host: str, *, token: bool) -> bool:
    """Whether a service on `host` serves only this machine's processes that know the job's token: those of its user.

    Args:
        host: the address that it listens on.
        token: whether it asks for one.
    """
    return token and is_loopback(host)
