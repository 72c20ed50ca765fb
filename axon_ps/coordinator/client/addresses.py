"""The addresses of a job's coordinators, of which one leads. A client tries them in order.

A host name may stand for several coordinators. Then each of its IP addresses is tried.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.carriers.in_process import is_in_process
from axon_ps.rpc.channels import Channel, connect, join_address, split_address, split_addresses, until_connected
from axon_ps.rpc.security import Security

CONNECT_S: Final = 1.0
"""Seconds that one of several addresses has to take a connection in the first round, doubled in each later round."""

MAX_CONNECT_S: Final = 8.0

RESOLVE_S: Final = 2.0
"""Seconds that a look-up of a name may take. After that the name is used as it is."""


@dataclass(frozen=True)
class Endpoint:
    """One address, and the host name from whose look-up it came, if any."""

    address: str
    name: str = ""


class Addresses:
    """The addresses at which a coordinator may lead, and the one to try now.

    Args:
        text: "host:port", or several with commas between them.

    Raises:
        ConfigurationError: one of them is malformed.
    """

    def __init__(self, text: str) -> None:
        self._given = [Endpoint(address) for address in split_addresses(text)]
        self._endpoints = self._given
        self._index = 0
        self._tried = 0
        self._connect_s = CONNECT_S

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints)

    @property
    def present(self) -> Endpoint:
        """The address to try."""
        return self._endpoints[self._index]

    def connect(self, security: Security) -> Channel:
        """Open a channel to the present address; see `rpc.channels.connect`."""
        return self.connect_to(self.present, security)

    def connect_to(self, endpoint: Endpoint, security: Security) -> Channel:
        """Open a channel to an address."""
        return connect(endpoint.address, security, name=endpoint.name, to=Principal.COORDINATOR)

    async def until_connected(self, channel: Channel) -> None:
        """Return when a channel of `connect` can be used; at once if there is no other address to try.

        Raises:
            Unreachable: there is no answer.
        """
        if len(self) > 1:
            await until_connected(channel, self._connect_s)

    def found(self) -> None:
        """Note that a coordinator leads at the present address: a member that loses it begins a new round."""
        self._tried, self._connect_s = 0, CONNECT_S

    async def next(self, known: Endpoint | None = None) -> bool:
        """Go on to the next address; return False if all were tried, after a new look-up of the names.

        Args:
            known: the address of the present leader, if known: it is tried first.
        """
        if known in self._endpoints:
            self._index = self._endpoints.index(known)
            return True
        self._tried += 1
        if self._tried < len(self._endpoints):
            self._index = (self._index + 1) % len(self._endpoints)
            return True
        present = self.present
        self._connect_s = min(2 * self._connect_s, MAX_CONNECT_S)
        await self.look_up()
        still = [i for i, endpoint in enumerate(self._endpoints) if endpoint == present]
        self._index = (still[0] + 1 if still else 0) % len(self._endpoints)
        return False

    async def look_up(self) -> None:
        """Look up the names, and begin a new round with the first address."""
        each = await asyncio.gather(*(_look_up(endpoint.address) for endpoint in self._given))
        self._endpoints, self._index, self._tried = [endpoint for endpoints in each for endpoint in endpoints], 0, 0


async def _look_up(address: str) -> list[Endpoint]:
    """Return the IP addresses behind one address: several if its host is a name of several."""
    host, port = split_address(address)
    if is_in_process(host) or _is_number(host):
        return [Endpoint(address)]
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # also a time-out; connecting raises an error that says more
        return [Endpoint(address)]
    families: dict[int, list[str]] = {}
    for family, _, _, _, where in found:
        families.setdefault(family, []).append(str(where[0]))
    if all(len(numbers) < 2 for numbers in families.values()):
        return [Endpoint(address)]
    return [Endpoint(join_address(number, port), host) for numbers in families.values() for number in numbers]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
