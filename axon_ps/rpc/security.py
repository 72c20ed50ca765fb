"""Who may listen where, and how both ends prove who they are: TLS certificates and tokens.

Loopback may be plaintext. Any other bind address needs TLS and a token, or an explicit `insecure`. The token travels
as metadata `authorization: Bearer ...` on every call (added by `service.Stub`, checked by the server before any
servicer gets the call, the health service excepted). It is never logged and not part of any repr or message. A server
may know a second, read-only one for observers; `access` says what may be called with which.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.access import Principal, may_call, needs_no_token, refusal
from axon_ps.rpc.status import status_of

TOKEN_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
_logger = logging.getLogger(__name__)
_NO_TOKEN: Final = "this server asks for the job's token, and none was given"
_WRONG_TOKEN: Final = "the token is none of this server's; is it the token of this job?"


@dataclass(frozen=True, kw_only=True)
class Security:
    """How a server or a client secures its connections. The default is plaintext without a token, on loopback only.

    Attributes:
        token: what a client sends, and what a server lets do everything: the job's shared secret; empty = none is asked
            for or sent.
        observer_token: what a server lets only read, too (a client gives it as its `token`); empty = none.
        ca_file: PEM of the authorities trusted. A client that has one uses TLS; a server with `mutual` checks clients
            against it.
        cert_file: PEM certificate (chain) of this end: a server's, or a client's for mutual TLS.
        key_file: PEM private key of `cert_file`.
        mutual: the server demands a certificate signed by `ca_file` from every client.
        insecure: allow a server to listen beyond loopback without TLS or without a token.
    """

    token: str = field(default="", repr=False)
    observer_token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    mutual: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            given, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise ConfigurationError(f"{given} is given without {missing}; TLS needs both")
        if self.mutual and not self.ca_file:
            raise ConfigurationError("mutual TLS needs ca_file, the authority that signed the clients' certificates")
        for name, token in (("token", self.token), ("observer's token", self.observer_token)):
            if not token.isascii() or any(c.isspace() or not c.isprintable() for c in token):
                raise ConfigurationError(f"the {name} cannot be sent; use printable ASCII characters without spaces")

    def check_bind(self, host: str, port: int = 0) -> None:
        """Refuse to listen on `host` when that would be open to the network.

        Raises:
            ConfigurationError: `host` is not loopback and TLS or token is missing, and `insecure` is not set; or there
                is no such port.
        """
        if not 0 <= port < 65536:
            raise ConfigurationError(f"port {port} does not exist; use 1 to 65535, or 0 for any free one")
        if self.insecure or is_loopback(host):
            return
        needed = (("a certificate and key", self.cert_file), ("a token", self.token))
        missing = [what for what, given in needed if not given]
        if missing:
            raise ConfigurationError(
                f"listening on {host!r}, which is not loopback, needs {' and '.join(missing)}; "
                "set what is missing, or set insecure to go without"
            )

    def principals(self) -> dict[str, Principal]:
        """Whom a server lets in, by token; empty = everybody, to everything.

        Raises:
            ConfigurationError: the observer's token would restrict nobody.
        """
        if self.observer_token and not self.token:
            raise ConfigurationError(
                "there is an observer's token and none of the job, so everybody may do everything; give the job's, too"
            )
        if self.observer_token and hmac.compare_digest(self.observer_token, self.token):
            raise ConfigurationError("the observer's token equals the job's, so it is not read-only; give another")
        given = {self.token: Principal.JOB, self.observer_token: Principal.OBSERVER}
        return {token: principal for token, principal in given.items() if token}

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a listening server; None for plaintext.

        Raises:
            ConfigurationError: a file is missing, unreadable or not PEM.
        """
        if not self.cert_file:
            if self.mutual:
                raise ConfigurationError("mutual TLS needs cert_file and key_file on the server")
            return None
        pair = (_read(self.key_file, "key_file"), _read(self.cert_file, "cert_file"))
        authority = _read(self.ca_file, "ca_file") if self.mutual else None
        return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=self.mutual)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a client's channel; None for plaintext.

        Raises:
            ConfigurationError: a file is missing, unreadable or not PEM.
        """
        if not self.ca_file:
            if self.cert_file:
                _logger.warning("connecting in plaintext: a certificate is given, but no ca_file to switch TLS on")
            return None
        if self.mutual and not self.cert_file:
            raise ConfigurationError("mutual TLS needs cert_file and key_file on the client too")
        key = _read(self.key_file, "key_file") if self.key_file else None
        chain = _read(self.cert_file, "cert_file") if self.cert_file else None
        return grpc.ssl_channel_credentials(_read(self.ca_file, "ca_file"), key, chain)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client sends with every call."""
        return token_metadata(self.token)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries `token`; nothing for an empty one."""
    return ((TOKEN_KEY, _SCHEME + token),) if token else ()


def is_loopback(host: str) -> bool:
    """Whether listening on `host` is reachable from this machine only."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _read(path: str, option: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {path!r} cannot be read: {error.strerror or error}") from error
    if b"-----BEGIN " not in content:
        raise ConfigurationError(f"{option} {path!r} is not a PEM file")
    return content


class Tokens:
    """Who a caller is, by the value of its `authorization`.

    Args:
        principals: by token; see `Security.principals`. Empty = everybody may do everything.

    Attributes:
        asked_for: whether a token is needed at all.
    """

    def __init__(self, principals: Mapping[str, Principal]) -> None:
        self.asked_for = bool(principals)
        self._principals = [((_SCHEME + token).encode(), principal) for token, principal in principals.items()]

    def principal(self, given: bytes) -> Principal | None:
        """Whose token was given; None = nobody's."""
        if not self.asked_for:
            return Principal.JOB
        known = [principal for token, principal in self._principals if hmac.compare_digest(given, token)]
        return known[0] if known else None

    def why_unknown(self, given: str | bytes) -> str:
        """What to say to a caller that is nobody."""
        return _WRONG_TOKEN if given else _NO_TOKEN


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses, before a servicer sees it, every call whose token does not allow it; health checks are let through.

    Args:
        principals: who a caller is, by token; see `Security.principals`.
    """

    def __init__(self, principals: Mapping[str, Principal]) -> None:
        self._tokens = Tokens(principals)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, or one of the same kind that refuses the call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or needs_no_token(method):
            return handler
        given = next((v for k, v in handler_call_details.invocation_metadata if k == TOKEN_KEY), "")
        principal = self._tokens.principal(given if isinstance(given, bytes) else given.encode())
        if principal is None:
            unknown = PermissionDenied(self._tokens.why_unknown(given))
            return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, unknown)
        if not may_call(principal, method):
            denied = PermissionDenied(refusal(principal, method))
            return _refusing(handler, grpc.StatusCode.PERMISSION_DENIED, denied)
        return handler


def _refusing(handler: Any, code: grpc.StatusCode, error: PermissionDenied) -> Any:
    _, details, metadata = status_of(error)

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(code, details, metadata)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
