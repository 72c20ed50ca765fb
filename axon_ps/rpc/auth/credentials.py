"""A server's account of a caller: its identity by certificate and token, their validity, and the calls it may make.

A caller's role is taken from its certificate, if that has a SPIFFE ID, and from its token. If both are present, both
must allow a call. Without either, it may only make calls that need no role (`access`), if the server asks for any.

Note: [Revoked while a connection is open]
    A handshake's checks would not end a connection that is open. So every call is checked, and the calls under way of a
    caller that is revoked are ended, with the error `Revoked`. A revocation names the id of a token, the serial
    number of a certificate, or the id of a process, which all its certificates have (`authority`).

Note: [A stream ends with its credentials]
    A stream may last for days, longer than the credentials with which it was opened. `GRACE_S` after their end the
    stream is ended, unless newer credentials of the same caller were shown for it (`StreamEnd.extend`). The caller gets
    `Broken`. So a client opens it again by itself, with newer credentials if it has any, and is refused if not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from axon_ps.errors import Broken, ConfigurationError, PermissionDenied
from axon_ps.rpc.access import may_call, refusal
from axon_ps.rpc.auth.certificates import PeerCertificate, peer_certificate
from axon_ps.rpc.auth.identity import EVERY_ROLE, Identity, Principal
from axon_ps.rpc.auth.tokens import as_text, is_role_token, verified
from axon_ps.rpc.security import SCHEME, Security

GRACE_S: Final = 5.0
"""Seconds that a stream lasts longer than its credentials."""

_LOOK_S: Final = 600.0
"""Most seconds between two looks at the clock for the end of a stream."""

_NO_TOKEN: Final = "this server asks for the job's token, and none was given"
_WRONG_TOKEN: Final = "the token is none of this server's; is it the token of this job?"


@dataclass(frozen=True)
class Credentials:
    """The caller.

    Attributes:
        roles: the roles that it may act in.
        rank: the only rank that it may have; None = any.
        names: ids that revoke it, of its token, its certificate and its process; empty = it cannot be revoked.
        has_secret: whether it has the job's secret, so that it can make itself other credentials.
        expires_s: the end of their validity, in seconds since 1970.
        text: a description of the caller, for messages.
    """

    roles: frozenset[Principal] = EVERY_ROLE
    rank: int | None = None
    names: tuple[str, ...] = ()
    has_secret: bool = True
    expires_s: float = math.inf
    text: str = "a caller of this process, or without credentials"

    def check_join(self, role: Principal, rank: int) -> int:
        """Return the rank with which it may join as `role`, given the rank that it wants (-1 = any).

        Raises:
            PermissionDenied: it may not.
        """
        if role not in self.roles:
            raise PermissionDenied(f"{self.text} may not join the job as a {role.value}")
        if self.rank is not None and rank not in (-1, self.rank):
            raise PermissionDenied(f"{self.text} may not join as {role.value} {rank}")
        return rank if self.rank is None else self.rank


class Unknown(PermissionDenied):
    """The server does not know the caller: UNAUTHENTICATED. A known role without permission gets PERMISSION_DENIED."""


class Revoked(Unknown):
    """The caller was revoked while its call was under way."""


class Ended(Broken):
    """A stream is ended because its credentials have expired: UNAUTHENTICATED. Open it again, with newer ones."""


EVERYBODY: Final = Credentials()
"""The credentials of every caller, if a server asks for none."""

_calling: ContextVar[Credentials] = ContextVar("axon_ps_calling", default=EVERYBODY)


def calling() -> Credentials:
    """Return the caller of the call that is being served; in a servicer."""
    return _calling.get()


class StreamEnd:
    """The end of the stream that the current task serves. See Note: [A stream ends with its credentials].

    Args:
        credentials: the credentials with which it was opened.

    Attributes:
        is_over: whether it was ended.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.is_over = False
        self._text = credentials.text
        self._expires_s = credentials.expires_s
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        if self._expires_s < math.inf:
            self._look()

    def extend(self, newer: Credentials) -> None:
        """Extend the stream to the end of newer credentials, if they are of the same caller."""
        if newer.text == self._text or newer.has_secret:
            self._expires_s = max(self._expires_s, newer.expires_s)

    def error(self) -> Ended:
        """Return the error for its caller."""
        return Ended(
            f"the credentials that this stream was opened with ({self._text}) are over; open it with newer ones"
        )

    def close(self) -> None:
        """Stop the timer, because the stream is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._expires_s + GRACE_S - time.time()
        if left_s > 0:  # the clock may be set meanwhile
            self._timer = asyncio.get_running_loop().call_later(min(left_s, _LOOK_S), self._look)
        elif self._task is not None:
            self.is_over = True
            self._task.cancel()


_stream_end: ContextVar[StreamEnd | None] = ContextVar("axon_ps_stream_end", default=None)


def stream_end() -> StreamEnd | None:
    """Return the end of the stream that is being served; in a servicer. None = it is a call of one message."""
    return _stream_end.get()


class Revocations:
    """The names that are revoked, and the calls under way of callers that may be revoked. For one event loop."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._calls: defaultdict[str, set[asyncio.Task[object]]] = defaultdict(set)
        self._ended: set[asyncio.Task[object]] = set()

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reasons, by the name that is revoked."""
        return self._reasons

    def set(self, reasons: Mapping[str, str]) -> None:
        """Set the reasons by the name that is revoked; calls under way of names that are new there are ended."""
        new = [name for name in reasons if name not in self._reasons]
        self._reasons = dict(reasons)
        for task in {task for name in new for task in self._calls.get(name, ())}:
            self._ended.add(task)
            task.cancel()

    def check(self, names: Iterable[str]) -> None:
        """Refuse names that are revoked.

        Raises:
            PermissionDenied: one of these names is revoked.
        """
        if why := self._why(names):
            raise PermissionDenied(why)

    def _why(self, names: Iterable[str]) -> str:
        """Return why these are refused; empty when they are not."""
        for name in names:
            if name in self._reasons:
                return f"these credentials ({name}) were revoked" + (f": {r}" if (r := self._reasons[name]) else "")
        return ""

    @contextlib.contextmanager
    def watching(self, credentials: Credentials, *, is_stream: bool = False) -> Iterator[None]:
        """Register the current task as serving a call with these; `set` can end it, which then raises `Revoked`.

        A stream is also ended when its credentials expire: it raises `Ended`.
        """
        task = asyncio.current_task()
        assert task is not None, "a call is served by a task"
        _calling.set(credentials)
        end = StreamEnd(credentials) if is_stream else None
        _stream_end.set(end)
        for name in credentials.names:
            self._calls[name].add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._ended:
                task.uncancel()
                raise Revoked(self._why(credentials.names)) from None
            if end is not None and end.is_over:
                task.uncancel()
                raise end.error() from None
            raise
        finally:
            if end is not None:
                end.close()
            self._ended.discard(task)
            for name in credentials.names:
                self._calls[name].discard(task)
                if not self._calls[name]:
                    del self._calls[name]


OnRefused = Callable[[str, Credentials, str, PermissionDenied], None]


class Guard:
    """The rules of one server: its callers, and the calls that they may make.

    Args:
        security: the server's security.
        revocations: the names that are revoked; None = none, yet.

    Attributes:
        revocations: the same.
        on_refused: gets path, credentials, address and error of each known caller whose role may not make the call.
        asks: whether credentials are asked for at all.

    Raises:
        ConfigurationError: the observer's token would restrict no caller, or a token cannot be read.
    """

    def __init__(self, security: Security, revocations: Revocations | None = None) -> None:
        self.revocations = revocations or Revocations()
        self.on_refused: OnRefused = _nothing
        self._security = security
        self._job = "" if security.identity is None else security.identity.job
        tokens, observer = security.tokens(), security.observer_token
        if observer and not tokens:
            raise ConfigurationError(
                "there is an observer's token and none of the job, so everybody may do everything; give the job's, too"
            )
        if any(hmac.compare_digest(observer, token) for token in tokens):
            raise ConfigurationError("the observer's token equals the job's, so it is not read-only; give another")
        self.asks = bool(tokens) or security.spiffe

    def admit(self, path: str, authorization: bytes, certificate: bytes = b"", peer: str = "") -> Credentials:
        """Return the caller of `path`, if it may make the call.

        Args:
            path: the RPC, or "METHOD PATH" of HTTP, as in `access`.
            authorization: the value of its `authorization`; empty = none.
            certificate: its certificate, as PEM, which the handshake has verified; empty = none.
            peer: its address.

        Raises:
            Unknown: the caller is not known.
            PermissionDenied: its role may not make the call.
        """
        credentials = self.credentials(authorization, certificate)
        if not may_call(credentials.roles, path):
            error = PermissionDenied(refusal(credentials.roles, path))
            self.on_refused(path, credentials, peer, error)
            raise error
        return credentials

    def credentials(self, authorization: bytes, certificate: bytes) -> Credentials:
        """Return the credentials of a caller.

        Raises:
            Unknown: there are none, or they are wrong, expired, revoked, or another job's.
        """
        try:
            by_certificate = self._by_certificate(certificate) if certificate else None
            by_token = self._by_token(authorization) if authorization and self.asks else None
            found = _both(by_certificate, by_token)
            if found is None and self.asks:
                raise PermissionDenied(_NO_TOKEN)
            found = found or EVERYBODY
            self.revocations.check(found.names)
            return found
        except PermissionDenied as error:
            raise Unknown(str(error)) from None

    def _by_certificate(self, pem: bytes) -> Credentials | None:
        found = peer_certificate(pem, self._security.spiffe_pattern)
        if found.expires_s <= time.time():  # the connection is older than that
            raise PermissionDenied(f"the certificate expired at {as_text(found.expires_s)}; connect with a newer one")
        if found.identity is None:
            if self._security.spiffe:
                raise PermissionDenied("the certificate has no SPIFFE ID, so it names no role")
            return None
        self._check_job(found.identity, "certificate")
        return Credentials(
            frozenset({found.identity.role}),
            found.identity.rank,
            _names_of(found),
            found.makes_itself,
            found.expires_s,
            str(found.identity),
        )

    def _by_token(self, authorization: bytes) -> Credentials:
        known = self._security.tokens()
        for token in known:
            if hmac.compare_digest(authorization, (SCHEME + token).encode()):
                return Credentials(text="a holder of the job's secret")
        observer = self._security.observer_token
        if observer and hmac.compare_digest(authorization, (SCHEME + observer).encode()):
            roles = frozenset({Principal.OBSERVER})
            return Credentials(roles, None, (), False, text="an observer")
        token = authorization.decode(errors="replace").removeprefix(SCHEME)
        if not is_role_token(token):
            raise PermissionDenied(_WRONG_TOKEN)
        claims = verified(token, known, self._job)
        identity = claims.identity
        return Credentials(
            frozenset({identity.role}), identity.rank, (claims.id,), False, claims.expires_s, str(identity)
        )

    def _check_job(self, identity: Identity, what: str) -> None:
        if self._job and identity.job and identity.job != self._job:
            raise PermissionDenied(f"the {what} is of job {identity.job!r}, and this is job {self._job!r}")


def _nothing(path: str, credentials: Credentials, peer: str, error: PermissionDenied) -> None:
    """Ignore a refused caller: the default of `Guard.on_refused`."""


def _names_of(certificate: PeerCertificate) -> tuple[str, ...]:
    return tuple(filter(None, (certificate.process, certificate.serial)))


def _both(one: Credentials | None, other: Credentials | None) -> Credentials | None:
    """Combine two credentials of a caller: a call must be allowed by both."""
    if one is None or other is None:
        return one or other
    ranks = {rank for rank in (one.rank, other.rank) if rank is not None}
    if len(ranks) > 1:
        raise PermissionDenied(f"the certificate is of {one.text}, and the token of {other.text}: two ranks")
    return Credentials(
        one.roles & other.roles,
        next(iter(ranks), None),
        (*one.names, *other.names),
        one.has_secret or other.has_secret,
        min(one.expires_s, other.expires_s),
        f"{one.text} (by its token, {other.text})" if one.text != other.text else one.text,
    )
