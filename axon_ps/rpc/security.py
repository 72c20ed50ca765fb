"""Who may listen where, and how both ends prove who they are: TLS certificates and the job token.

Loopback may be plaintext. Any other bind address needs TLS and a token, or an explicit `insecure`. The token travels
as metadata `authorization: Bearer ...` on every call (added by `service.Stub`, checked by the server before any
servicer gets the call, the health service excepted). It is never logged and not part of any repr or message.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.status import status_of

TOKEN_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
_logger = logging.getLogger(__name__)
_NO_TOKEN: Final = "this server asks for the job's token, and none was given"
_WRONG_TOKEN: Final = "the job token is not the one of this server; is it the token of this job?"
_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"


@dataclass(frozen=True, kw_only=True)
class Security:
    """How a server or a client secures its connections. The default is plaintext without a token, on loopback only.

    Attributes:
        token: the job's shared secret; empty = none is asked for or sent.
        ca_file: PEM of the authorities trusted. A client that has one uses TLS; a server with `mutual` checks clients
            against it.
        cert_file: PEM certificate (chain) of this end: a server's, or a client's for mutual TLS.
        key_file: PEM private key of `cert_file`.
        mutual: the server demands a certificate signed by `ca_file` from every client.
        insecure: allow a server to listen beyond loopback without TLS or without a token.
    """

    token: str = field(default="", repr=False)
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
        if not self.token.isascii() or any(c.isspace() or not c.isprintable() for c in self.token):
            raise ConfigurationError("the token cannot be sent; use printable ASCII characters without spaces")

    def check_bind(self, host: str) -> None:
        """Refuse to listen on `host` when that would be open to the network.

        Raises:
            ConfigurationError: `host` is not loopback and TLS or token is missing, and `insecure` is not set.
        """
        if self.insecure or is_loopback(host):
            return
        needed = (("a certificate and key", self.cert_file), ("a token", self.token))
        missing = [what for what, given in needed if not given]
        if missing:
            raise ConfigurationError(
                f"listening on {host!r}, which is not loopback, needs {' and '.join(missing)}; "
                "set what is missing, or set insecure to go without"
            )

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


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the right token before a servicer sees it; health checks are let through."""

    def __init__(self, token: str) -> None:
        self._expected = (_SCHEME + token).encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, or one of the same kind that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        given = next((v for k, v in handler_call_details.invocation_metadata if k == TOKEN_KEY), "")
        if hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._expected):
            return handler
        return _refusing(handler, PermissionDenied(_WRONG_TOKEN if given else _NO_TOKEN))


def _refusing(handler: Any, error: PermissionDenied) -> Any:
    _, details, metadata = status_of(error)

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, details, metadata)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
