"""A listening socket on the event loop, which still works after its process could open no more files.

Note: [No more files]
    A connection that cannot be accepted waits in the kernel, and the socket stays readable. A loop that tries again at
    once would do nothing else, so it tries again after `AGAIN_S`. The log names the limit, once in `LOG_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - getaddrinfo imports it, which is called on the loop
import logging
import socket
from collections.abc import Callable
from typing import Final

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.limits import no_more_files

AGAIN_S: Final = 1.0
"""Seconds until accepting is tried again, after this process could open no more files."""

LOG_EVERY_S: Final = 60.0
BACKLOG: Final = 512

_logger = logging.getLogger(__name__)


class TcpListener:
    """Accepts connections until `close`. It belongs to the event loop on which it is made.

    Args:
        host: address to listen on.
        port: port to listen on; 0 = any free one.
        what: the kind of connections, for messages.
        take: gets every connection, whose socket is non-blocking; it must not raise.

    Attributes:
        port: the port.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, what: str, take: Callable[[socket.socket], None]) -> None:
        bare = host.strip("[]")
        try:
            family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
            dual = family == socket.AF_INET6 and bare == "::"
            listener = socket.create_server((bare, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        except OSError as error:
            why = no_more_files(error) or error.strerror or str(error)
            raise ConfigurationError(f"cannot listen for {what} on port {port} of {host}: {why}") from error
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._what = what
        self._take = take
        self._logged_s = -LOG_EVERY_S
        self._listener: socket.socket | None = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None, "a closed one is not read"
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if why := no_more_files(error):
                self._pause(why)
            return  # else the client has gone already
        sock.setblocking(False)
        self._take(sock)

    def _pause(self, why: str) -> None:
        """Stop accepting for `AGAIN_S`. See Note: [No more files]."""
        assert self._listener is not None, "a closed one is not read"
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(AGAIN_S, self._resume)
        if (now_s := self._loop.time()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            _logger.warning("%s cannot be accepted: %s", self._what, why)

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)
