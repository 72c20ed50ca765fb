"""The leader among the coordinators: it created the key PREFIX/leader, and leads as long as its lease is renewed.

    PREFIX/leader            the leader, as JSON: its id and address; created by a transaction, under its lease
    PREFIX/candidates/ID     a coordinator that leads or stands by: whether members have just asked it; under its lease

Note: [Who leads]
    A leader counts its own lease from before each renewal was sent, so it stops before etcd removes the key. The clock
    goes on while the process or its machine is suspended. That is enough to stop answering in time. Writes are left to
    etcd, where every transaction compares the revision at which the key was created.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Final

from axon_ps.errors import AxonError, Closed
from axon_ps.storage.state_store.etcd_cluster import EtcdCluster, Found, created_at, found, put, read
from axon_ps.texts import value_of_json

RENEWALS: Final = 6
"""Number of renewals of a lease while it lasts."""

ASKED_S: Final = 2.0
"""Seconds for which a member's request to a coordinator that stands by counts."""

_JOIN_S: Final = 10.0

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Term:
    """One lease of ours.

    Attributes:
        id: names us while it lasts.
        lease: etcd's number of it.
        renewed_s: time at which its newest renewal was sent.
        created: the revision at which we created the leader's key; 0 = we have not.
        asked: our entry in etcd: whether members have just asked us; None = there is none yet.
    """

    id: str
    lease: int
    renewed_s: float
    created: int = 0
    asked: bool | None = None


class Leadership:
    """One coordinator's candidacy. A thread renews the lease from the first `campaign` to `close`.

    Args:
        cluster: for `campaign`.
        renewals: for the thread.
        prefix: of the keys.
        ttl_s: of a lease.
    """

    def __init__(self, cluster: EtcdCluster, renewals: EtcdCluster, prefix: str, ttl_s: int) -> None:
        self.address = ""
        self.leader_key = f"{prefix}/leader".encode()
        self._candidates = f"{prefix}/candidates/".encode()
        self._cluster = cluster
        self._renewals = renewals
        self._ttl_s = ttl_s
        self._term: _Term | None = None
        self._others: tuple[bool, ...] = ()  # whether members have asked them
        self._asked_s = -ASKED_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, name="axon_ps-etcd-lease", daemon=True)

    def campaign(self) -> str:
        """Try once to lead; see `SharedStateStore.campaign`."""
        if self._closed.is_set():
            raise Closed("this candidate was withdrawn: its state store was closed")
        if self._thread.ident is None:
            self._thread.start()
        term = self._term
        if term is None or self._is_over(term):
            began_s = now_s()
            self._term = term = _Term(uuid.uuid4().hex, self._cluster.grant(self._ttl_s), began_s)
        there = read(self.leader_key)
        if not (leaders := found(self._cluster.transaction([], [there])[2][0])):  # else nothing is to be written
            value = json.dumps({"id": term.id, "address": self.address}).encode()
            won, revision, replies = self._cluster.transaction(
                [created_at(self.leader_key, 0)], [put(self.leader_key, value, term.lease)], [there]
            )
            if won:
                self._others, term.created = (), revision
                return ""
            leaders = found(replies[0])
        if _id_of(leaders[0]) == term.id:  # see Note: [Sent twice] of `etcd_cluster`
            self._others, term.created = (), leaders[0].created
            return ""
        return str(value_of_json(leaders[0].value, "the leader's key").get("address")) or "another coordinator"

    def leads(self) -> bool:
        """Return True if we lead at this moment. See Note: [Who leads]."""
        term = self._term
        return term is not None and term.created > 0 and not self._is_over(term)

    @property
    def id(self) -> str:
        """Our id while we lead or stand by; empty when we do neither."""
        term = self._term
        return "" if term is None else term.id

    @property
    def created(self) -> int:
        """The revision at which we created the leader's key; 0 when we do not lead."""
        term = self._term
        return 0 if term is None else term.created

    def refused(self) -> None:
        """Note that a member has asked us while we do not lead."""
        self._asked_s = now_s()

    def has_standby(self, *, asked: bool) -> bool:
        """Return True if others stand by; if `asked`, others that members have just asked."""
        return any(self._others) if asked else bool(self._others)

    def resign(self) -> None:
        """End our lease, so that another coordinator may lead."""
        term, self._term = self._term, None
        if term is not None:
            try:
                self._renewals.revoke(term.lease)
            except AxonError as error:
                _logger.debug("the lease could not be revoked, and ends by itself: %s", error)

    def close(self) -> None:
        """Resign for good."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self.resign()

    def _renew_all(self) -> None:
        while not self._closed.wait(self._ttl_s / RENEWALS):
            term = self._term
            if term is not None:
                try:
                    self._renew(term)
                except AxonError as error:
                    _logger.debug("the lease was not renewed: %s", error)

    def _renew(self, term: _Term) -> None:
        began_s = now_s()
        if self._is_over(term) or not self._renewals.renew(term.lease):
            if self._term is term:
                self.resign()
            return
        term.renewed_s = began_s
        asked = began_s - self._asked_s < ASKED_S
        if term.created:
            end = self._candidates[:-1] + b"0"  # what comes after "/"
            (reply,) = self._renewals.transaction([], [read(self._candidates, end)])[2]
            self._others = tuple(c.value == _ASKED for c in found(reply) if not c.key.endswith(term.id.encode()))
        elif asked != term.asked:
            self._renewals.transaction([], [put(self._candidates + term.id.encode(), _ASKED * asked, term.lease)])
            term.asked = asked

    def _is_over(self, term: _Term) -> bool:
        return now_s() >= term.renewed_s + self._ttl_s


_ASKED: Final = b"asked"


def now_s() -> float:
    """Return the time on a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _id_of(leader: Found) -> str:
    return str(value_of_json(leader.value, "the leader's key").get("id"))
