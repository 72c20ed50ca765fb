"""Ports for programs that must be told theirs: torch's store, etcd, a coordinator that others are pointed at."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _LAST = 20000, 32000  # below those the kernel gives away (Linux: from 32768 on)

_attempts = itertools.count()


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row that are free on all addresses of this machine.

    They are below those that the kernel gives to connections and to servers that ask for any, so that nobody takes one
    before the program does. Each call gives others, and processes that ask at the same time begin at different ones.

    Raises:
        OSError: none are free.
    """
    room = (_LAST - _FIRST) // count
    for attempt in itertools.islice(_attempts, room):
        first = _FIRST + (os.getpid() * 37 + attempt) % room * count
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
