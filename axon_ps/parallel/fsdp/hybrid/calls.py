"""Calls that the workers of a node make together, in one order: collectives inside it, and their end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from axon_ps.collectives.work import WorkQueue
from axon_ps.errors import AxonError, Broken, Closed, again
from axon_ps.parallel.fsdp.hybrid.node_groups import NodeGroups
from axon_ps.parallel.work import QueuedWork
from axon_ps.types import Array

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class NodeCalls:
    """The calls inside a node.

    Args:
        groups: the workers of the node.

    Attributes:
        groups: as given.
        group_error: the error that ended the node's groups, until they are formed again.
    """

    def __init__(self, groups: NodeGroups) -> None:
        self.groups = groups
        self.group_error: AxonError | None = None
        self._work_queue = WorkQueue("axon-ps-node-units")
        self._call_digest = hashlib.sha256()
        self._failure: AxonError | None = None  # the error after which no further step can be made

    def form_again(self, timeout_s: float) -> None:
        """Make the node's groups anew, once the calls queued for the old ones have ended."""
        self._work_queue.submit(lambda: None).result(timeout_s)
        _logger.warning("this node makes its groups again, since a worker of it was lost: %s", self.group_error)
        self.groups.form(self.group_error)
        self._call_digest = hashlib.sha256()
        self.group_error = None

    def exchange(self, values: Sequence[int]) -> Array | None:
        """Return every worker's numbers, i64[workers, numbers], or None once a worker of the node was lost."""
        mine = np.array([values], np.int64)
        return self.within(lambda: self.groups.control.all_gather(mine))

    def within(self, call: Callable[[], T]) -> T | None:
        """Return the result of a collective of the node. Once a worker of the node was lost, return None at once."""
        if self.group_error is not None:
            return None
        try:
            return call()
        except (Broken, Closed) as error:
            self.group_error = again(error)
            return None

    def in_order(
        self, run: Callable[[], Any], what: str, given_up: Callable[[], object] = lambda: None
    ) -> QueuedWork[Any]:
        """Queue a call. After one has failed no more are made, since the workers are out of step."""

        def guarded() -> Any:
            if self._failure is not None:
                given_up()
                raise again(self._failure)
            try:
                return run()
            except AxonError as error:
                self._failure = again(error)
                raise

        return QueuedWork(self._work_queue.submit(guarded), what)

    def record(self, what: bytes, unit: int) -> None:
        """Record a call of this step, for `take_digest`."""
        self._call_digest.update(what + unit.to_bytes(4, "little"))

    def take_digest(self) -> int:
        """Return a number made of the calls of this step. It is equal on workers that have made the same calls."""
        digest, self._call_digest = self._call_digest.digest(), hashlib.sha256()
        return int.from_bytes(digest[:8], "little", signed=True)

    def close(self) -> None:
        """End the queue. The groups are the world's, and stay."""
        self._work_queue.close(_CLOSE_TIMEOUT_S)
