"""Secrets of the workers that form a job: the coordinator's address and the job's secret.

Note: [Nothing secret is in the store]
    torch's store listens on all interfaces and authenticates no client. So it holds nothing that a stranger could use,
    and no address read from it is trusted with a secret:

    - on one host the address and a random secret go through the kernel: rank 0 serves them at a Unix socket, and both
      ends learn from the kernel which user the other is;
    - on several hosts every worker has the secret from its environment, and the address is in the store. The process
      that listens there must prove, by mutual TLS, that it has the secret, too. Without a common secret, no two hosts
      can authenticate each other: a stranger could send the same messages.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

from axon_ps.errors import Unreachable
from axon_ps.rpc.auth.tokens import check_strong, new_secret
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.texts import value_of_json
from axon_ps.worker.bootstrap.local_store import LocalStore

_KEY: Final = "job"
_PAUSE_S: Final = 0.02
_INSTEAD: Final = (
    ", on all of them; or set AXON_PS_TLS_DIR; or AXON_PS_TLS_CERT, _KEY and _CA besides a token; "
    "or AXON_PS_INSECURE=1 to trust the network; or start services with `axon-ps run`"
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorAccess:
    """The coordinator's address, and the token for it."""

    coordinator: str
    token: str


def secured(given: Security, *, several_hosts: bool) -> Security:
    """Return the security of the services that a job's workers start, given that of their environment.

    Raises:
        ConfigurationError: the workers are on several hosts, and their environment has no secret that all know.
    """
    if not several_hosts:
        return given if given.tokens() else dataclasses.replace(given, token=new_secret())
    if given.insecure or given.spiffe:
        return given
    if given.cert_file and given.tokens():
        return given
    secret = next(iter(given.tokens()), "")
    check_strong(secret, "a job whose workers are on several hosts and start its services", _INSTEAD)
    return dataclasses.replace(given, tls=True)


def serve(access: CoordinatorAccess, incarnation: str, timeout_s: float) -> LocalStore:
    """Serve the access to the other workers of this host. The caller closes the store when the job ends.

    Raises:
        Unreachable: another process serves a store of the same name.
    """
    store = LocalStore(_name(incarnation), serves=True, timeout_s=timeout_s)
    store.set(_KEY, json.dumps(dataclasses.asdict(access)))
    return store


def receive(incarnation: str, deadline: Deadline) -> CoordinatorAccess:
    """Return the address and secret that rank 0, the worker of this incarnation, serves on this host.

    Raises:
        Unreachable: no process serves them until the deadline.
        PermissionDenied: a process of another user serves them.
    """
    store = LocalStore(_name(incarnation), serves=False, timeout_s=deadline.remaining())
    while not store.check([_KEY]):
        if deadline.expired:
            raise Unreachable(
                "the worker of rank 0 is on this host and does not answer: is it of another network namespace or user?"
            )
        time.sleep(min(_PAUSE_S, deadline.remaining()))
    found: dict[str, Any] = value_of_json(store.get(_KEY), "what the worker of rank 0 has stored")
    return CoordinatorAccess(str(found["coordinator"]), str(found["token"]))


def own(security: Security, coordinator: str) -> CoordinatorAccess:
    """Return the address from the store, with the secret of this worker's environment; for several hosts.

    Raises:
        ConfigurationError: the environment has no secret.
    """
    secured(security, several_hosts=True)
    return CoordinatorAccess(coordinator, next(iter(security.tokens()), ""))


def announce(address: str, *, made_secret: bool) -> None:
    """Log that this worker has started a coordinator, since none was named."""
    how = "a random secret, which only processes of this user on this host get" if made_secret else "the secret given"
    _logger.warning("no AXON_PS_COORDINATOR is set: this worker has started one at %s, with %s", address, how)


def _name(incarnation: str) -> str:
    return f"private/{incarnation}"
