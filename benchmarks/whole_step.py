"""Step time of a 17M-parameter residual MLP: axon_ps against FSDP2 over gloo, the same torch model on both sides.

The places are:

    loopback             processes of this machine that share memory
    sockets              loopback for processes without shared memory, such as containers of one host
    500, 1000            four worker hosts plus four server hosts (network namespaces, see netns.py) whose cards carry
                         500 Mbit/s or 1 Gbit/s each way
    own-500, own-1000    four hosts in all, each with a worker and a shard server, which share memory and a card

The coordinator is on the first host with a shard server, and sends almost nothing. FULL_SHARD is compared with FSDP2
that reshards after forward, SHARD_GRAD_OP with FSDP2 that does not. Both sides use f32, then both use bf16 (parameters,
compute and gradients). The sides axon-int8 and axon-int4 compute in the same dtype, and send int8 blocks with error
feedback, or int4 blocks, which for parameters are differences. The sides axon-kept have CPUOffload.PARAMS: gathered
parameters stay in host memory, so that backward gathers nothing. Runs of the sides alternate.

- A step's time is the median over the timed steps of all rounds. A trace of rank 0 shows where axon_ps waits.
- CPU seconds are those of all processes of a side, workers and servers. Those for a GB of moved bytes are without the
  workers' forward and backward alone.
- Bytes are those that one card received and sent per step, with workers' and servers' cards apart. theory.py has the
  least that a worker's card has to carry. If it carried less, processes of two hosts would have taken each other for
  neighbours, so the run fails.
- "uneven" is the busiest of these cards over the idlest.
- "leased" is what a worker passed to servers of its host in memory.

With --one-host everything is on this machine, and there is one shard server, whose memory workers map.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axon_ps.compress.registry import compressor
from axon_ps.host.ports import free_ports
from axon_ps_lab import report
from cluster import Loopback, Place, Sockets, axon_cluster, cpu_s, rss_mib
from netns import CONGESTION, Network, NetworkUnavailable
from theory import Sizes, card_bytes

HERE = Path(__file__).parent
SIDES = {
    "fsdp2": ["fsdp2"],
    "axon": ["axon"],
    "axon-r2": ["axon"],
    "axon-int8": ["axon", "--wire", "int8"],
    "axon-int8-r2": ["axon", "--wire", "int8"],
    "axon-kept": ["axon", "--offload", "params"],
    "axon-kept-int8": ["axon", "--offload", "params", "--wire", "int8"],
    "axon-int4": ["axon", "--wire", "int4"],
    "axon-int4-r2": ["axon", "--wire", "int4"],
}
"""By side, the arguments of step_worker.py. Sides that end with -r2 have two copies of each slice, the others one."""
ONE_MACHINE = {"loopback": Loopback, "sockets": Sockets}
"""Places that are this machine itself."""
OWN = "own-"
"""First part of the names of places with a shard server on each worker's host, behind the same card."""
BYTES = {"float32": 4.0, "bfloat16": 2.0}
LEAST_OF_THEORY = 0.98

RUN_TIMEOUT_S = 180.0
Around = Callable[[Sequence[int], Sequence[int]], AbstractContextManager[None]]
MIB = 1 << 20


@dataclass
class Sample:
    """The resources that a side's processes and cards had used at one moment."""

    cpu_s: float
    cards: dict[str, tuple[int, int]]

    @classmethod
    def take(cls, place: Place, processes: Sequence[subprocess.Popen[Any]], hosts: Sequence[str]) -> Sample:
        """Read the counters now."""
        return cls(sum(cpu_s(p.pid) for p in processes), {host: place.counters(host) for host in hosts})

    def each_per_step(self, before: Sample, steps: int, hosts: Sequence[str]) -> list[tuple[float, float]]:
        """Return the MiB that the card of each of `hosts` received and sent per step since `before`."""
        mib = steps * MIB
        pairs = ((self.cards[host], before.cards[host]) for host in hosts)
        return [((now[0] - then[0]) / mib, (now[1] - then[1]) / mib) for now, then in pairs]

    def per_step(self, before: Sample, steps: int, hosts: Sequence[str]) -> tuple[float, float]:
        """Return the MiB that the mean card of `hosts` received and sent per step since `before`."""
        return mean_card(self.each_per_step(before, steps, hosts))


def mean_card(cards: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of the cards' received and sent amounts."""
    return statistics.mean(card[0] for card in cards), statistics.mean(card[1] for card in cards)


@dataclass
class Figures:
    """All rounds of one side under one setting."""

    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    workers_mib: list[tuple[float, float]] = field(default_factory=list)  # of each worker's host
    server_mib: tuple[float, float] = (0.0, 0.0)
    leased_mib: float = 0.0
    server_rss_mib: float = 0.0
    moved_mib: float = 0.0
    losses: list[float] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    trace: dict[str, float] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.times_s)

    @property
    def worker_mib(self) -> tuple[float, float]:
        """MiB that the mean card of a worker's host received and sent."""
        return mean_card(self.workers_mib)

    @property
    def uneven(self) -> float:
        """MiB of the busiest worker's card over those of the idlest, in the less even direction."""
        directions = ([card[way] for card in self.workers_mib] for way in (0, 1))
        return max(max(mib) / min(mib) for mib in directions)


@dataclass(frozen=True)
class Team:
    """The workers of a run, and its shard servers, if its side has some.

    Attributes:
        hosts: names of their hosts.
        per_host: number of workers on each host.
        servers: names of the shard servers' hosts, one each; `hosts` if they are on the workers' hosts.
    """

    hosts: tuple[str, ...]
    per_host: int
    servers: tuple[str, ...]

    @classmethod
    def of(cls, workers: int, per_host: int = 1, servers: int | None = 4) -> Team:
        """Make a team of `workers` and `servers` in all; None: a server on each worker's host."""
        hosts = tuple(f"worker{i}" for i in range(workers // per_host))
        return cls(hosts, per_host, hosts if servers is None else tuple(server_hosts(servers)))

    @property
    def own_servers(self) -> bool:
        """True if shard servers are on the workers' hosts."""
        return self.servers == self.hosts

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """Names of all hosts, each once."""
        return tuple(dict.fromkeys((*self.hosts, *self.servers)))

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.hosts) * self.per_host


def server_hosts(servers: int = 4) -> list[str]:
    """Return the names of the shard servers' hosts; the coordinator is on the first."""
    return [f"server{i}" for i in range(servers)]


def launch(
    place: Place, team: Team, command: Sequence[str], environment: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """Start the workers of one run."""
    workers = []
    for rank in range(team.size):
        host = team.hosts[rank // team.per_host]
        local_rank = rank if isinstance(place, Loopback) else rank % team.per_host
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "AXON_PS_NODE": place.node(host)}
        workers.append(
            place.popen(host, command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
    return workers


def expect(worker: subprocess.Popen[str], word: str) -> None:
    """Read the worker's output up to `word`."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"rank 0 ended with {worker.wait()} before it said {word}")


def go_on(worker: subprocess.Popen[str]) -> None:
    """Answer a worker that waits."""
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


def one_run(
    place: Place,
    team: Team,
    command: Sequence[str],
    steps: int,
    into: Figures,
    *,
    replication: int,
    shard: Sequence[str] = (),
    around: Around = lambda _workers, _servers: nullcontext(),
) -> None:
    """Run one side's worker command for the whole team once, with a cluster unless `replication` is 0.

    The timed steps run in a context that `around` makes of the workers' and the servers' process ids.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(team.size),
        "LOCAL_WORLD_SIZE": str(team.size if isinstance(place, Loopback) else team.per_host),
        "MASTER_ADDR": place.address(team.hosts[0]),
        "MASTER_PORT": str(free_ports()),
        "GLOO_SOCKET_IFNAME": "lo" if isinstance(place, Loopback) else "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
    if replication:
        cluster = axon_cluster(place, team.servers, workers=team.size, replication=replication, shard=shard)
        with cluster as (servers, coordinator):
            environment["AXON_PS_COORDINATOR"] = coordinator
            measure(place, team, command, steps, environment, servers, into, around)
    else:
        measure(place, team, command, steps, environment, [], into, around)


def measure(
    place: Place,
    team: Team,
    command: Sequence[str],
    steps: int,
    environment: dict[str, str],
    servers: Sequence[subprocess.Popen[Any]],
    into: Figures,
    around: Around,
) -> None:
    """Start the workers, read counters around their timed steps, collect their results."""
    workers = launch(place, team, command, environment)
    processes, hosts = [*workers, *servers], place.hosts
    expect(workers[0], "READY")
    with around([w.pid for w in workers], [s.pid for s in servers]):
        before = Sample.take(place, processes, hosts)
        go_on(workers[0])
        expect(workers[0], "DONE")
        after = Sample.take(place, processes, hosts)
    into.server_rss_mib = statistics.mean(rss_mib(server.pid) for server in servers[1:]) if servers else 0.0
    go_on(workers[0])
    results = []
    for worker in workers:
        output, _ = worker.communicate(timeout=RUN_TIMEOUT_S)
        if worker.returncode:
            raise RuntimeError(f"{shlex.join(command)} ended with {worker.returncode}")
        results.append(json.loads(output.strip().splitlines()[-1]))
    into.times_s += results[0]["times_s"]
    into.losses = results[0]["losses"]
    into.digests.append(results[0]["digest"])
    into.slowest_s += [max(own) for own in zip(*(result["device_s"] for result in results), strict=True)]
    into.trace = results[0].get("trace", {})
    into.cpu_s.append((after.cpu_s - before.cpu_s) / steps)
    into.workers_mib = after.each_per_step(before, steps, team.hosts)
    into.leased_mib = statistics.mean(result["leased_bytes"] for result in results) / MIB
    senders = hosts[:1] if isinstance(place, Loopback) else hosts  # loopback has one device for all hosts
    into.moved_mib = sum(after.cards[h][1] - before.cards[h][1] for h in senders) / steps / MIB
    if not team.own_servers:
        into.server_mib = after.per_step(before, steps, [host for host in team.servers if host in place.hosts])


def one_alone(dtype: str, options: argparse.Namespace) -> tuple[float, Sizes]:
    """Return the seconds of forward and backward of one worker alone, and the sizes of its model."""
    command = [sys.executable, str(HERE / "step_worker.py"), "compute", *shape(options), "--dtype", dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = json.loads(done.stdout)
    return round(found["compute_s"], 3), Sizes(options.blocks, found["block_numel"], found["root_numel"])


def shape(options: argparse.Namespace) -> list[str]:
    """Return the arguments that fix the model and its batch."""
    return [
        *("--device-s", str(getattr(options, "device_s", 0.0))),
        *("--width", str(options.width), "--blocks", str(options.blocks), "--tokens", str(options.tokens)),
        *("--steps", str(options.steps), "--warmup", str(options.warmup), "--clip", str(options.clip)),
    ]


def theory_mib(team: Team, dtype: str, strategy: str, side: str, sizes: Sizes) -> tuple[float, float]:
    """Return the MiB that a worker's card has to receive and send in a step."""
    element_bytes = BYTES[dtype]
    how = next((name for name in ("int8", "int4") if name in side), None)
    if how is not None:
        element_bytes = compressor(how).compressed_bytes(sizes.block) / sizes.block
    received, sent = card_bytes(
        sizes,
        strategy,
        ours=side != "fsdp2",
        hosts=len(team.hosts),
        own_servers=team.own_servers,
        element_bytes=element_bytes,
        kept="kept" in side or (how is not None and compressor(how).differences),
    )
    return received / MIB, sent / MIB


def of_theory(place: str, side: str, figures: Figures, theory: tuple[float, float]) -> float:
    """Return the bytes of a worker's card over the theory's, in the direction where that is more.

    Raises:
        RuntimeError: a card carried less than it has to, so bytes bypassed the cards.
    """
    least = min(part / whole for card in figures.workers_mib for part, whole in zip(card, theory, strict=True))
    if least < LEAST_OF_THEORY:
        raise RuntimeError(
            f"{place}, {side}: a card carried {least:.2f} of what it has to ({theory}): hosts share something else"
        )
    return max(part / whole for part, whole in zip(figures.worker_mib, theory, strict=True))


def row(
    place: str,
    team: Team,
    dtype: str,
    strategy: str,
    side: str,
    figures: Figures,
    peer: Figures | None,
    alone: tuple[float, Sizes],
) -> dict[str, Any]:
    """Return a line of the table."""
    compute_s, sizes = alone
    cards = 0 if place in ONE_MACHINE else len(team.hosts if side == "fsdp2" else team.all_hosts)
    cpu_s = statistics.median(figures.cpu_s)
    theory = None
    if cards and (team.per_host == 1 or strategy == "hybrid_shard") and not (team.own_servers and side.endswith("-r2")):
        theory = theory_mib(team, dtype, strategy, side, sizes)
    return {
        "place": place,
        "workers": f"{len(team.hosts)} x {team.per_host}" if team.per_host > 1 else str(team.size),
        "servers": 0 if side == "fsdp2" else len(team.servers),
        "dtype": dtype,
        "strategy": strategy,
        "side": side,
        "step_s": round(figures.median_s, 3),
        "slowest_s": round(max(figures.times_s), 3),
        "ratio": round(figures.median_s / peer.median_s, 3) if peer and peer is not figures else None,
        "cpu_s_per_step": round(cpu_s, 2),
        "moved_mib": round(figures.moved_mib, 1),
        "cpu_s_per_gb": round((cpu_s - team.size * compute_s) / (figures.moved_mib * MIB / 1e9), 2),
        "cards": cards,
        "theory_rx_mib": round(theory[0], 1) if theory else None,
        "theory_tx_mib": round(theory[1], 1) if theory else None,
        "worker_rx_mib": round(figures.worker_mib[0], 1),
        "worker_tx_mib": round(figures.worker_mib[1], 1),
        "of_theory": round(of_theory(place, side, figures, theory), 3) if theory else None,
        "uneven": round(figures.uneven, 3) if theory else None,
        "leased_mib": round(figures.leased_mib, 1),
        "server_rx_mib": round(figures.server_mib[0], 1),
        "server_tx_mib": round(figures.server_mib[1], 1),
        "server_rss_mib": round(figures.server_rss_mib),
        "steps": len(figures.times_s),
        "last_loss": figures.losses[-1],
        "trace": figures.trace,
        "times_s": [round(t, 3) for t in figures.times_s],
    }


def teams(place: str, options: argparse.Namespace) -> list[Team]:
    """Return the teams of each size in a place."""
    servers = None if place.startswith(OWN) else options.servers
    return [Team.of(workers, options.per_host, servers) for workers in options.workers]


def bench(
    name: str,
    place: Place,
    in_place: Sequence[Team],
    options: argparse.Namespace,
    alone: dict[str, tuple[float, Sizes]],
) -> list[dict[str, Any]]:
    """Run all settings in one place; sides alternate."""
    rows = []
    for team, dtype, strategy in itertools.product(in_place, options.dtypes, options.strategies):
        workers = team.size
        arguments = [*shape(options), "--dtype", dtype, "--strategy", strategy]
        figures = {side: Figures() for side in options.sides}
        for _ in range(options.rounds):
            for side, into in figures.items():
                begin_s = time.perf_counter()
                command = [sys.executable, str(HERE / "step_worker.py"), *SIDES[side], *arguments]
                if side != "fsdp2":
                    trace = re.sub("[^a-z0-9]+", "-", f"{name}-{workers}-{strategy}-{dtype}-{side}".lower())
                    command += ["--trace", f"{options.traces}/{trace}.json"]
                replication = 0 if side == "fsdp2" else 2 if side.endswith("-r2") else 1
                one_run(place, team, command, options.steps, into, replication=replication)
                say = f"{name} {workers} {dtype} {strategy} {side}: {into.median_s:.3f} s a step"
                print(f"{say} ({time.perf_counter() - begin_s:.0f} s)", file=sys.stderr, flush=True)
        peer = figures[options.sides[0]]
        rows += [row(name, team, dtype, strategy, s, into, peer, alone[dtype]) for s, into in figures.items()]
    return rows


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--places",
        nargs="+",
        default=["loopback", "sockets", "500", "1000", "own-500", "own-1000"],
        help="or another number of Mbit/s; own-: with a shard server on each worker's host",
    )
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=("full_shard", "shard_grad_op", "hybrid_shard"),
        default=["full_shard", "shard_grad_op"],
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--servers", type=int, default=4, help="shard servers, where these have hosts of their own")
    parser.add_argument("--per-host", type=int, default=1, help="workers of a host; 2 with --strategies hybrid_shard")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["fsdp2", "axon", "axon-int8"])
    parser.add_argument("--rounds", type=int, default=2, help="times each side runs under each setting")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="rows of each worker's batch")
    parser.add_argument("--clip", type=float, default=0.0, help="global gradient norm; 0: no clipping")
    parser.add_argument("--traces", default="/tmp/axon-ps-traces", help="a directory for rank 0's traces, of ours")
    parser.add_argument("--write", default="whole_step", help="name of the file of results")
    parser.add_argument("--quick", action="store_true", help="500 Mbit/s only, one round, three steps")
    parser.add_argument(
        "--one-host", action="store_true", help="2 and 4 workers beside one shard server, FULL_SHARD; writes one_host"
    )
    parser.add_argument("--replication", action="store_true", help="what a second copy costs; writes replication")
    options = parser.parse_args()
    if options.replication:
        options.places, options.strategies, options.write = ["loopback", "500"], ["full_shard"], "replication"
        options.sides, options.rounds = ["axon", "axon-r2"], 3
    if options.quick:
        options.places, options.rounds, options.steps, options.warmup = ["500"], 1, 3, 2
    if options.one_host:  # short steps vary more, and the first ones map memory
        options.places, options.servers, options.workers, options.write = ["loopback"], 1, [2, 4], "one_host"
        options.strategies, options.sides = ["full_shard"], ["fsdp2", "axon"]
        if not options.quick:
            options.rounds, options.steps, options.warmup = 3, 12, 6
    return options


COLUMNS = (
    *("place", "workers", "servers", "dtype", "strategy", "side", "step_s", "ratio", "cpu_s_per_step", "cpu_s_per_gb"),
    *("cards", "moved_mib", "theory_rx_mib", "worker_rx_mib", "theory_tx_mib", "worker_tx_mib", "of_theory", "uneven"),
    *("leased_mib", "server_rx_mib", "server_tx_mib", "server_rss_mib"),
)


BREAKDOWN_OF = ("place", "workers", "servers", "dtype", "strategy", "side")
BREAKDOWN = (
    *("step_s", "compute_s", "blocked_gather_s", "blocked_push_s", "blocked_decision_s", "communication_s", "hidden"),
)


def main() -> None:
    """Run every place; where namespaces cannot be made, print the reason and go on with the others."""
    options = parse()
    Path(options.traces).mkdir(parents=True, exist_ok=True)
    alone, rows = {dtype: one_alone(dtype, options) for dtype in options.dtypes}, []
    for place in options.places:
        try:
            kind, rate, in_place = ONE_MACHINE.get(place), place.removeprefix(OWN), teams(place, options)
            hosts = list(dict.fromkeys(host for team in in_place for host in team.all_hosts))
            with kind(hosts) if kind is not None else Network(hosts, rate_mbit=float(rate)) as network:
                name = place if kind is not None else f"{rate} Mbit/s{', own hosts' * place.startswith(OWN)}"
                rows += bench(name, network, in_place, options, alone)
        except NetworkUnavailable as error:
            print(f"left out {place}: {error}", file=sys.stderr)
    report.table("Whole step", COLUMNS, [[r[c] for c in COLUMNS] for r in rows])
    traced = [r for r in rows if r["trace"]]
    report.table(
        "Where rank 0's step goes, of ours (see step_trace.py)",
        (*BREAKDOWN_OF, *BREAKDOWN),
        [[*(r[c] for c in BREAKDOWN_OF), *(round(r["trace"].get(c, 0.0), 3) for c in BREAKDOWN)] for r in traced],
    )
    alone_s = {dtype: compute_s for dtype, (compute_s, _) in alone.items()}
    print(f"Forward and backward of one worker alone: {alone_s} s; the workers share {os.cpu_count()} cores.")
    settings = {k: v for k, v in vars(options).items() if k != "quick"}
    congestion = CONGESTION if set(options.places) - ONE_MACHINE.keys() else None
    report.write(options.write, rows, compute_alone_s=alone_s, settings=settings, congestion=congestion)


if __name__ == "__main__":
    main()
