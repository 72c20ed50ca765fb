"""`FailoverCluster`: a cluster with three etcd members and two coordinators, whose connections can be cut.

A proxy is between each coordinator and each etcd member. Another one is between each coordinator and all members of
the job. See `axon_ps_lab.faults.cluster` for clusters of one coordinator.
"""

from __future__ import annotations

import json
import time
from typing import Final

from axon_ps.host.children import Child
from axon_ps.storage.state_store.etcd_cluster import EtcdAddress, EtcdCluster, found, read
from axon_ps.testing.cluster import LocalCluster
from axon_ps_lab.etcd import LocalEtcd
from axon_ps_lab.faults.fault import Fault
from axon_ps_lab.faults.proxy import Disturbance, Proxies, TcpProxy

PREFIX: Final = "/failover"
COORDINATORS: Final = 2

_BATCH: Final = 100
_TIMEOUT_S: Final = 5.0


class FailoverCluster(LocalCluster):
    """A job whose coordinator may die.

    Args:
        shards, world_size, lease_s: as for `LocalCluster`.
        etcd_members, quota_bytes: as for `LocalEtcd`.
    """

    def __init__(
        self, shards: int, world_size: int, *, lease_s: float, etcd_members: int = 3, quota_bytes: int = 0
    ) -> None:
        super().__init__(shards, world_size, lease_s=lease_s, coordinators=COORDINATORS)
        self.etcd = LocalEtcd(etcd_members, quota_bytes=quota_bytes)
        self._proxies = Proxies()
        self._to_etcd: list[list[TcpProxy]] = []
        self._to_coordinators: list[TcpProxy] = []

    def __enter__(self) -> FailoverCluster:
        """Start etcd, proxies, coordinators and shard servers."""
        self.etcd.__enter__()
        self._proxies.__enter__()
        self._client = EtcdCluster(EtcdAddress.parse(f"{self.etcd.address}{PREFIX}"), _TIMEOUT_S)
        self._is_up = True
        try:
            for _ in range(COORDINATORS):
                self._to_etcd.append([self._proxies.open(_host_and_port(e)) for e in self.etcd.endpoints])
                self._to_coordinators.append(self._proxies.open())
            super().__enter__()
        except BaseException:
            self._end_network()
            raise
        return self

    def leader(self) -> int:
        """Return the index of the coordinator that leads; -1 = none."""
        (reply,) = self._client.transaction([], [read(f"{PREFIX}/leader".encode())])[2]
        leaders = [json.loads(kv.value)["address"] for kv in found(reply)]
        listening = [f"127.0.0.1:{(proxy.upstream or ('', 0))[1]}" for proxy in self._to_coordinators]
        return listening.index(leaders[0]) if leaders else -1

    def take_stall(self) -> float:
        """Return the longest time since the last call in which the proxies did not run: the machine was busy."""
        stalled_s, self._proxies.stalled_s = self._proxies.stalled_s, 0.0
        return stalled_s

    def cut_from_etcd(self, index: int, seconds: float) -> None:
        """Delay all bytes between a coordinator and etcd until `seconds` have passed."""
        for proxy in self._to_etcd[index]:
            proxy.disturb(Disturbance(kind=Fault.BLACK_HOLE, seconds=seconds))

    def cut_from_members(self, index: int, seconds: float) -> None:
        """Delay all bytes between a coordinator and the members of the job until `seconds` have passed."""
        self._to_coordinators[index].disturb(Disturbance(kind=Fault.BLACK_HOLE, seconds=seconds))

    def writers(self) -> list[tuple[int, str]]:
        """Return the transactions that wrote the job's state: revision, and id of the leadership that wrote it.

        Transactions before etcd was compacted are not known any more.
        """
        key = f"{PREFIX}/writer".encode()
        newest, revision = [], self._client.transaction([], [read(key)])[1]
        for first in range(self.etcd.oldest, revision + 1, _BATCH):
            revisions = range(first, min(first + _BATCH, revision + 1))
            for reply in self._client.transaction([], [read(key, revision=r) for r in revisions])[2]:
                newest += [(kv.modified, kv.value.decode().split()[0]) for kv in found(reply)]
        return sorted(set(newest))

    def written(self) -> set[int]:
        """Return the revisions at which the present records were written, since etcd was compacted."""
        (reply,) = self._client.transaction([], [read(f"{PREFIX}/records/".encode(), f"{PREFIX}/records0".encode())])[2]
        return {kv.modified for kv in found(reply) if kv.modified > self.etcd.oldest}

    def _state_of(self, index: int) -> str:
        return f"etcd:{','.join(proxy.address for proxy in self._to_etcd[index])}{PREFIX}"

    def _listening(self, process: Child, deadline: float) -> str:
        address = super()._listening(process, deadline)
        if process not in self._processes.coordinators:
            return address
        proxy = self._to_coordinators[self._processes.coordinators.index(process)]
        proxy.upstream = _host_and_port(address)
        return proxy.address

    def restart(self, role: str, index: int = 0) -> None:  # type: ignore[override]  # coordinators only
        """Restart a coordinator that was killed, behind the same address."""
        self.process(role, index).end()
        self._listening(self._spawn_coordinator(index, port=0), time.monotonic() + self._start_timeout_s)

    def _end_all(self) -> tuple[list[str], str]:
        ended = super()._end_all()
        self._end_network()
        return ended

    def _end_network(self) -> None:
        """End proxies and etcd, unless they have ended."""
        if self._is_up:
            self._is_up = False
            self._proxies.__exit__(None, None, None)
            self._client.close()
            self.etcd.__exit__(None, None, None)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
