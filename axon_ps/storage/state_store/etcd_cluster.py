"""The address of an etcd cluster, and its client: each request goes to the member that answered last, or to the next.

Requests go through its JSON gateway (etcd 3.4 and later), by the client `etcd3gw` of the extra `etcd`.

Note: [Sent twice]
    A request without an answer may have been performed, or may be performed later. So every request here may be sent
    again: reads, leases, transactions that compare something which they change, and a candidate's write of its own key.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

from axon_ps.errors import AxonError, Broken, ConfigurationError, InternalError, StorageFull

T = TypeVar("T")

Operation = dict[str, Any]
"""A comparison or a request of a transaction, as the gateway's JSON has it."""

DEFAULT_PREFIX: Final = "/axon_ps"
DEFAULT_TTL_S: Final = 3
MIN_TTL_S: Final = 2
"""The shortest TTL that etcd grants with its default election time-out."""

MAX_TTL_S: Final = 60

GONE: Final = "requested lease not found"

SLOWER: Final = 4

_API: Final = "/v3/"
_FULL: Final = "database space exceeded"
_REFUSED: Final = ("permission denied", "authentication", "user name is empty", "invalid auth token")
_TOO_MUCH: Final = ("request is too large", "too many operations", "duplicate key", "larger than max")


@dataclass(frozen=True)
class EtcdAddress:
    """The address of a store: "HOST:PORT[,HOST:PORT...][/PREFIX][?ttl=SECONDS&ca=FILE&cert=FILE&key=FILE]".

    Attributes:
        endpoints: host and port of each member of the cluster.
        prefix: of all keys; begins with "/".
        ttl_s: of the lease by which a coordinator leads, in seconds.
        ca, cert, key: PEM files, for TLS: the authority that we trust, and our own certificate.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str = DEFAULT_PREFIX
    ttl_s: int = DEFAULT_TTL_S
    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Parse an address.

        Raises:
            ConfigurationError: it has another form.
        """
        location, _, query = text.partition("?")
        members, slash, prefix = location.partition("/")
        options = dict(parse_qsl(query))
        endpoints = []
        for member in members.split(","):
            host, _, port = member.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigurationError(
                    f"{member!r} is no member of an etcd cluster: give etcd:HOST:PORT[,HOST:PORT...][/PREFIX]"
                )
            endpoints.append((host.strip("[]"), int(port)))
        if unknown := options.keys() - {"ttl", "ca", "cert", "key"}:
            raise ConfigurationError(f"etcd has no option {unknown.pop()!r} here; it has ttl, ca, cert and key")
        ttl = options.pop("ttl", str(DEFAULT_TTL_S))
        if not (ttl.isascii() and ttl.isdigit() and MIN_TTL_S <= int(ttl) <= MAX_TTL_S):
            raise ConfigurationError(f"etcd's ttl is {ttl!r}; it must be {MIN_TTL_S} to {MAX_TTL_S} seconds")
        return cls(tuple(endpoints), (slash + prefix).rstrip("/") or DEFAULT_PREFIX, int(ttl), **options)

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)


class EtcdCluster:
    """Requests to a cluster. Any thread may make them. They are made one at a time.

    Args:
        address: where it is.
        timeout_s: seconds that a member may take to answer before another is asked. They double each time that no
            member answers, up to `SLOWER` times: a busy cluster is better than none.

    Raises:
        ConfigurationError: the client is not installed.
    """

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        try:
            import etcd3gw
            import requests
        except ImportError as error:
            raise ConfigurationError(
                "state in etcd needs its client: pip install 'axon-ps[etcd]' (the package etcd3gw)"
            ) from error
        self._address = address
        self._failures: tuple[type[Exception], ...] = (etcd3gw.exceptions.Etcd3Exception, requests.RequestException)
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._slower = 1
        self._first = 0
        self._clients = [self._client(etcd3gw, host, port, timeout_s) for host, port in address.endpoints]
        self._make_lease = etcd3gw.lease.Lease

    def _client(self, etcd3gw: Any, host: str, port: int, timeout_s: float) -> Any:
        a = self._address
        client = etcd3gw.client(
            host=host,
            port=port,
            protocol="https" if a.ca or a.cert else "http",
            ca_cert=a.ca or None,
            cert_cert=a.cert or None,
            cert_key=a.key or None,
            timeout=timeout_s,
            api_path=_API,
        )
        client.session.trust_env = False  # no proxy, as between members
        return client

    def transaction(
        self, compare: Sequence[Operation], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> tuple[bool, int, list[Any]]:
        """Perform `success` if all comparisons hold, else `failure`: all of it or nothing.

        Returns:
            True if the comparisons held, the revision of the store afterwards, and the response to each request.

        Raises:
            Broken: no member answers, or none has a majority. It may have been performed. See Note: [Sent twice].
            StorageFull: the cluster's quota is used up.
            ConfigurationError: it refuses us access.
        """
        request = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        reply = self._perform(lambda client: client.transaction(request))
        return bool(reply.get("succeeded")), int(reply["header"]["revision"]), reply.get("responses", [])

    def grant(self, ttl_s: int) -> int:
        """Make a lease; raises as `transaction` does."""
        return int(self._perform(lambda client: client.lease(ttl_s)).id)

    def renew(self, lease: int) -> bool:
        """Renew a lease; False when there is none any more. Raises as `transaction` does."""
        return bool(self._perform(lambda client: self._make_lease(lease, client).refresh()) > 0)

    def revoke(self, lease: int) -> None:
        """End a lease, and remove its keys; raises as `transaction` does."""
        self._perform(lambda client: self._revoke(client, lease))

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.session.close()

    def _revoke(self, client: Any, lease: int) -> None:
        try:
            self._make_lease(lease, client).revoke()
        except self._failures as error:
            if GONE not in _text(error):
                raise

    def _perform(self, call: Callable[[Any], T]) -> T:
        with self._lock:
            troubles = []
            for _ in self._clients:
                client = self._clients[self._first]
                client.timeout = self._timeout_s * self._slower
                try:
                    reply = call(client)
                    self._slower = 1
                    return reply
                except self._failures as error:
                    if (final := _final(error)) is not None:
                        raise final from error
                    host, port = self._address.endpoints[self._first]
                    troubles.append(f"{host}:{port}: {_text(error)[:200]}")
                    self._first = (self._first + 1) % len(self._clients)
            self._slower = min(2 * self._slower, SLOWER)
            raise Broken(f"etcd cannot be used ({'; '.join(troubles)})")


def put(key: bytes, value: bytes, lease: int = 0) -> Operation:
    """Return a request that stores a value."""
    return {"request_put": {"key": _b64(key), "value": _b64(value), **({"lease": lease} if lease else {})}}


def delete(key: bytes, end: bytes = b"") -> Operation:
    """Return a request that removes a key, or all from it to `end`."""
    return {"request_delete_range": {"key": _b64(key), **({"range_end": _b64(end)} if end else {})}}


def read(key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0) -> Operation:
    """Return a request that reads a key, or those from it to `end`, as they are or as they were at a revision."""
    request: dict[str, Any] = {"key": _b64(key), "limit": limit, "revision": revision}
    return {"request_range": request | ({"range_end": _b64(end)} if end else {})}


def created_at(key: bytes, revision: int) -> Operation:
    """Return a comparison: the key was created at this revision; 0 = there is none."""
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision}


def modified_at(key: bytes, revision: int) -> Operation:
    """Return a comparison: the key was last written at this revision; 0 = there is none."""
    return {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


@dataclass(frozen=True)
class Found:
    """A key as it was read."""

    key: bytes
    value: bytes
    created: int
    modified: int


def found(response: Any) -> list[Found]:
    """Return the results of a `read` of a transaction."""
    return [
        Found(
            key=base64.b64decode(kv["key"]),
            value=base64.b64decode(kv.get("value", "")),
            created=int(kv["create_revision"]),
            modified=int(kv["mod_revision"]),
        )
        for kv in response["response_range"].get("kvs", [])
    ]


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _text(error: Exception) -> str:
    return str(getattr(error, "detail_text", None) or error)


def _final(error: Exception) -> AxonError | None:
    """Return the error if every member of etcd would give it; None if another member may succeed."""
    text = _text(error)
    if GONE in text:
        return Broken("our lease in etcd is over")
    if _FULL in text:
        return StorageFull("etcd's quota is used up: compact and defragment it (docs/failover.md)")
    if any(sign in text for sign in _REFUSED):
        return ConfigurationError(f"etcd does not let us in: {text}")
    if any(sign in text for sign in _TOO_MUCH):
        return InternalError(f"etcd refuses what we made: {text}")
    return None
