"""The attackers, in a process of their own that gives way to all others of the machine.

So the steps of the job that trains beside show the cost of the servers' work, and not that of the attackers. In the end
the process prints the numbers of its messages and their results, as JSON.

    python -m axon_ps_lab.fuzz.attackers '{"ports": {...}, "token": "...", "seed": "1", "seconds": 10, ...}'
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from axon_ps_lab.fuzz.findings import Findings
from axon_ps_lab.fuzz.hostile.servers import HostileServers
from axon_ps_lab.fuzz.priorities import give_way
from axon_ps_lab.fuzz.targets.sockets import Sockets

END_S: Final = 600.0
"""Seconds beyond its plan that the process may take, which gets little of a busy machine."""

SIDE_BY_SIDE: Final = 96
"""Hostile connections at a time."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders of attackers.

    Attributes:
        ports: ports of the services, by name.
        token: the job's.
        job: its name.
        seed: seed of all choices.
        cases: directory for the messages that were sent before a finding.
        seconds: duration, over which everything is spread evenly; later ones are dropped. 0 = everything is sent at
            once.
        messages: sent in calls.
        connections: hostile ones, to services.
        servers: connections of the SDK's to hostile servers.
        level: the niceness of the process, as of `nice`.
    """

    ports: dict[str, int]
    token: str
    job: str
    seed: str
    cases: str
    seconds: float = 0.0
    messages: int = 0
    connections: int = 0
    servers: int = 0
    level: int = 0


@dataclass(kw_only=True)
class Attacked:
    """The results of attackers.

    Attributes:
        began_s: time of the begin, by the clock that processes of a machine share.
        seconds: duration of the attack.
        messages: sent in calls.
        connections: hostile ones, by kind.
        statuses: number of calls by the status with which they ended.
        met: connections to hostile servers.
        late: calls that took longer than they may by the clock, because the attackers were held up.
        held_up_s: the longest time for which they were held up.
        findings: number and text of each finding, by its name.
    """

    began_s: float = 0.0
    seconds: float = 0.0
    messages: int = 0
    connections: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    met: int = 0
    late: int = 0
    held_up_s: float = 0.0
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)


def attack(orders: Orders) -> Attacked:
    """Start a process that attacks, and wait for its end.

    Raises:
        AssertionError: it failed.
        TimeoutExpired: it did not end in time.
    """
    command = [sys.executable, "-m", "axon_ps_lab.fuzz.attackers", json.dumps(asdict(orders))]
    limit_s = orders.seconds + END_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, start_new_session=True)
    if done.returncode:
        raise AssertionError(f"the attackers failed themselves ({done.returncode}): {done.stderr[-3000:]}")
    return Attacked(**json.loads(done.stdout.splitlines()[-1]))


async def attacked(orders: Orders) -> Attacked:
    """Perform all attacks of the orders, side by side."""
    findings = Findings(Path(orders.cases))
    sockets = Sockets(findings, orders.ports, orders.job, orders.token)
    servers = HostileServers(findings)
    began_s = time.monotonic()
    async with sockets, asyncio.TaskGroup() as group:
        group.create_task(sockets.calls(f"{orders.seed}/calls", orders.messages, orders.seconds))
        group.create_task(sockets.attacks(f"{orders.seed}/attacks", orders.connections, SIDE_BY_SIDE, orders.seconds))
        group.create_task(servers.run(f"{orders.seed}/servers", orders.servers, orders.seconds))
    return Attacked(
        began_s=began_s,
        seconds=time.monotonic() - began_s,
        messages=sockets.messages,
        connections=dict(sockets.connections),
        statuses=dict(sockets.statuses),
        met=servers.connections,
        late=sockets.late,
        held_up_s=sockets.held_up_s,
        findings={what: (count, findings.texts[what]) for what, count in findings.counts.items()},
    )


def main() -> None:
    """See the module."""
    orders = Orders(**json.loads(sys.argv[1]))
    give_way(os.getpid(), orders.level)
    result: dict[str, Any] = asdict(asyncio.run(attacked(orders)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
