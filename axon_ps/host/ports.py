"""Ports for programs that need a port in advance: torch's store, etcd, a coordinator with a known address."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _LAST = 20000, 32000  # below the ephemeral ports (Linux: from 32768 on)

_attempts = itertools.count()


def free_ports(count: int = 1) -> int:
    """Return the first of `count` ports in a row that are free on all addresses of this machine.

    They are below the ephemeral ports, so that the kernel does not give one to another program before it is used. Each
    call returns other ports, and processes that call at the same time begin at different ones.

    Raises:
        OSError: none are free.
    """
    blocks = (_LAST - _FIRST) // count
    for attempt in itertools.islice(_attempts, blocks):
        first = _FIRST + (os.getpid() * 37 + attempt) % blocks * count
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, one in enumerate(sockets):
                one.bind(("", first + i))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise OSError(f"no {count} ports in a row are free between {_FIRST} and {_LAST}")
