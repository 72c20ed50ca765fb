"""The models of a job that this process trains: one, for now.

The servers of a job hold the parameters of one model. A second one with the same layout would silently be bound to
those of the first, so it is refused where it is made, on every worker and in whatever order. A process knows what it
has wrapped; that workers wrap different models of one layout is known to the coordinator alone, by `JobSpec.model`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from axon_ps.errors import Misuse


class Models:
    """By name, which models of the job this process has; the only name is "" until a job can have several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._described: dict[str, str] = {}

    @contextmanager
    def registering(self, described: str, name: str = "") -> Iterator[None]:
        """Inside, a model is registered with the job; if that raises, it is not the job's.

        A model stays the job's when its wrapper is deleted: its parameters are still on the servers.

        Args:
            described: what it is, in words.
            name: what the job calls it.

        Raises:
            Misuse: the process has registered another model by that name; the message says which.
        """
        with self._lock:
            if (first := self._described.get(name)) is not None:
                raise Misuse(
                    f"{described} cannot be wrapped: this process has wrapped {first}, and a job has one model, whose "
                    "parameters the second would get. Wrap one module that has both in it, or use NO_SHARD or another "
                    "job for one of them; to give the model that was wrapped other values, use its load_state_dict()"
                )
            self._described[name] = described
        try:
            yield
        except BaseException:
            with self._lock:
                del self._described[name]
            raise


__all__ = ["Models"]
