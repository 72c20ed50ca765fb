"""`LocalStore`: a key-value store for the workers of one host whose launcher has none, as mpirun.

The worker of rank 0 listens on an abstract Unix socket whose name all workers derive from the launcher's run. There is
no file, so nothing is left over, even after kill -9. Both ends learn from the kernel which user the other belongs to.
Another user is refused.

A request is one line of JSON on a connection of its own, and the reply is another line. Values are text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
import time
from typing import Any

from axon_ps.errors import PermissionDenied, Unreachable
from axon_ps.texts import value_of_json

_ANSWER_S = 5.0
_PAUSE_S = 0.02
_MAX_BYTES = 1 << 16


class LocalStore:
    """A store for the workers of one host and one user.

    Args:
        name: of the run, known to all its workers.
        serves: True if this worker holds the values. Exactly one does.
        timeout_s: most seconds that `set` waits for the worker that holds the values.

    Raises:
        Unreachable: another process serves a store of this name.
    """

    def __init__(self, name: str, *, serves: bool, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._values: dict[str, str] = {}
        self._listener: socket.socket | None = None
        if serves:
            self._listener = self._listen()
            thread = threading.Thread(target=self._serve, args=(self._listener,), name="axon-ps store", daemon=True)
            thread.start()

    def set(self, key: str, value: str) -> None:
        """Store a value, as soon as the worker that holds the values is there.

        Raises:
            Unreachable: that worker was not there in time.
            PermissionDenied: a process of another user holds them.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._ask({"key": key, "value": value}) is None:
            if time.monotonic() > deadline:
                raise Unreachable(f"the worker of rank 0 was not there within {self._timeout_s:g} s, on this host")
            time.sleep(_PAUSE_S)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return str((self._ask({"key": key}) or {})["value"]).encode()

    def check(self, keys: list[str]) -> bool:
        """Return True if all of these keys are there; False as long as the worker that holds them is not.

        Raises:
            PermissionDenied: a process of another user holds them.
        """
        return all("value" in (self._ask({"key": key}) or {}) for key in keys)

    def close(self) -> None:
        """Stop serving. Repeated calls do nothing."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._listener.close()

    @property
    def _address(self) -> str:
        return f"\0axon-ps-{os.getuid()}-{hashlib.sha256(self._name.encode()).hexdigest()[:32]}"

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise Unreachable(
                f"the workers of this run cannot meet: another process has the place of rank 0 ({error.strerror}); are "
                "two of them of the same rank?"
            ) from error
        return listener

    # ------------------------------------------------------------------ rank 0

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(_ANSWER_S)
                if _user_of(connection) == os.getuid():
                    connection.sendall(_line(self._answer(value_of_json(_read_line(connection), "a request"))))

    def _answer(self, request: dict[str, str]) -> dict[str, str]:
        key = str(request["key"])
        if "value" in request:
            self._values[key] = str(request["value"])
        return {"value": self._values[key]} if key in self._values else {}

    # ------------------------------------------------------------------ all ranks

    def _ask(self, request: dict[str, str]) -> dict[str, Any] | None:
        """Return the answer; None if no worker serves the store yet, or any more."""
        if self._listener is not None:
            return self._answer(request)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_ANSWER_S)
                connection.connect(self._address)
                if (user := _user_of(connection)) != os.getuid():
                    raise PermissionDenied(
                        f"the workers' meeting place on this host is held by a process of user {user}"
                    )
                connection.sendall(_line(request))
                reply: dict[str, Any] = value_of_json(_read_line(connection), "an answer")
                return reply
        except PermissionDenied:
            raise
        except (OSError, ValueError):  # the other end closed or was busy: treated as absent
            return None


def _user_of(connection: socket.socket) -> int:
    """Return the user whose process is at the other end, as the kernel reports it."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _line(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    content = b""
    while not content.endswith(b"\n"):
        received = connection.recv(4096)
        if not received or len(content) > _MAX_BYTES:
            raise ValueError("a request or reply was cut short")
        content += received
    return content
