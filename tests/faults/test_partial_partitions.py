"""Packets between two members are dropped, those with the coordinator are not: steps go on while they are.

Every member is a host of its own, a network namespace with a firewall. The network is cut both ways, one way, and for
large packets alone, as by a path whose MTU is smaller than everybody thinks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from command_line import AXON_PS, environment
from deadlines import HANG_S
from namespaces import network_of

PORT = "7400"
LEASE_S = "2"
SHARDS, WORKERS = 3, 3
STEPS_MEANWHILE = 5
SCRIPT = """
import os, pathlib, sys, time
import torch
import axon_ps
from axon_ps import parallel

torch.set_num_threads(1)
with axon_ps.World.init(timeout_s=300, join_timeout_s=300) as world:
    model = parallel.FSDP(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), world.default_group)
    optimizer = parallel.SGD(model, lr=2.0**-10)
    while not os.path.exists(sys.argv[2]):
        model(torch.ones(1, 256)).square().mean().backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if result.committed:
            pathlib.Path(sys.argv[1]).write_text(str(result.version))
        time.sleep(0.05)
"""
CUTS = {
    "both ways": (("INPUT", "-s"), ("OUTPUT", "-d")),
    "nothing comes": (("INPUT", "-s"),),
    "nothing goes": (("OUTPUT", "-d"),),
    "no large packet": (("INPUT", "-s", "-m", "length", "--length", "1000:65535"),),
}
"""The packets of the other that the first of two members drops: chains, directions and matches."""

ALL = [(one, other, how) for one, other in (("shard-0", "worker-1"), ("shard-0", "shard-1")) for how in CUTS]
SAMPLE = [ALL[-1]]


class Hosts:
    """The job: every member on a host of its own."""

    def __init__(self, network: Any, directory: Path, stack: contextlib.ExitStack) -> None:
        self._network, self._directory, self._stack = network, directory, stack
        self._coordinator = f"{network.address('coordinator')}:{PORT}"
        (directory / "train.py").write_text(SCRIPT)
        of_coordinator = ["--world-size", str(WORKERS), "--min-workers", "1", "--shards", str(SHARDS)]
        self._start("coordinator", "coordinator", "--port", PORT, "--lease-s", LEASE_S, *of_coordinator)
        for host in network.hosts[1:]:
            if host.startswith("shard"):
                self._start(host, "shard", "--coordinator", self._coordinator, "--node", host)
            else:
                self._train(host)

    def _start(self, host: str, command: str, *options: str) -> None:
        listen = ["--host", self._network.address(host), "--insecure"]
        self._popen(host, [*AXON_PS, command, *listen, *options])

    def _train(self, host: str) -> None:
        written = [str(self._directory / host), str(self._directory / "end")]
        own = {"AXON_PS_COORDINATOR": self._coordinator, "AXON_PS_NODE": host, "AXON_PS_INSECURE": "1"}
        self._popen(host, [AXON_PS[0], str(self._directory / "train.py"), *written], **own)

    def _popen(self, host: str, command: list[str], **own: str) -> None:
        log = self._stack.enter_context((self._directory / f"{host}.log").open("ab"))
        self._network.popen(host, command, env=environment(own), stdout=log, stderr=subprocess.STDOUT)

    def status(self) -> Any:
        """The output of `axon-ps status --json`; None while nobody answers."""
        command = [*AXON_PS, "status", "--coordinator", self._coordinator, "--insecure", "--json"]
        asked = self._network.popen(
            "coordinator", command, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        text, _ = asked.communicate(timeout=HANG_S)
        return None if asked.returncode else json.loads(text)

    @property
    def version(self) -> int:
        """The newest that a worker has seen."""
        texts = [path.read_text() for path in self._directory.glob("worker-?")]
        return max((int(text) for text in texts if text), default=0)

    @contextlib.contextmanager
    def cut(self, one: str, other: str, how: str) -> Iterator[None]:
        """Drop packets as long as the context lasts."""
        rules = [[chain, way, self._network.address(other), *match] for chain, way, *match in CUTS[how]]
        for rule in rules:
            self._iptables(one, "-A", rule)
        try:
            yield
        finally:
            for rule in rules:
                self._iptables(one, "-D", rule)

    def _iptables(self, host: str, do: str, rule: list[str]) -> None:
        chain, *match = rule
        inside = ["ip", "netns", "exec", self._network.namespace(host)]
        command = [*inside, "iptables", "-w", do, chain, *match, "-j", "DROP"]
        subprocess.run(command, check=True, capture_output=True)

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for something."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < HANG_S, f"{what}, in vain; version {self.version}: {self.status()}"
            time.sleep(0.1)

    def has_come_to(self, version: int) -> bool:
        """True once a worker has seen a version."""
        return self.version >= version

    def is_complete(self) -> bool:
        """True if everybody is there, and every slice has its copies."""
        status = self.status()
        if status is None or not status["models"]:
            return False
        there = tuple(len(status["membership"][role]) for role in ("workers", "shards"))
        return there == (WORKERS, SHARDS) and not any(model["lacking"] for model in status["models"])

    def end(self) -> None:
        """Let the workers finish."""
        (self._directory / "end").touch()


@pytest.mark.netns
@pytest.mark.parametrize("cuts", [SAMPLE, pytest.param(ALL, marks=pytest.mark.whole)], ids=["sample", "all"])
def test_steps_go_on_while_two_members_cannot_reach_each_other(
    tmp_path: Path, cuts: list[tuple[str, str, str]]
) -> None:
    if shutil.which("ip") is None or shutil.which("iptables") is None:
        pytest.skip("there is no iproute2 or no iptables here")
    members = [*(f"shard-{i}" for i in range(SHARDS)), *(f"worker-{i}" for i in range(WORKERS))]
    with contextlib.ExitStack() as stack:
        network = network_of("coordinator", *members)
        stack.callback(network.close)
        hosts = Hosts(network, tmp_path, stack)
        hosts.until("the job trains", lambda: hosts.version and hosts.is_complete())
        for one, other, how in cuts:
            with hosts.cut(one, other, how):
                before = hosts.version
                hosts.until(
                    f"steps go on though {one} and {other} cannot reach each other ({how})",
                    partial(hosts.has_come_to, before + STEPS_MEANWHILE),
                )
            hosts.until(f"all are back after {one} and {other} could not ({how})", hosts.is_complete)
        hosts.end()
