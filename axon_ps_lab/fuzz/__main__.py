"""`make lab NAME=fuzz`: all targets for a while; a table, and benchmarks/results/fuzz.json.

    make lab NAME=fuzz ARGS="--seconds 3600"
    make lab NAME=fuzz ARGS="--beside 120"

There are two parts. Each has a part of the record of its own:

  the attack    for `--seconds`: the targets inside of a process, guided by coverage, and real services under attack
                with a job that trains beside, with pauses; attackers and targets give way to others of the machine
  the job       for `--beside`: nothing but the services, their job and the attackers, by turns with and without an
                attack, so that a step's time says what an attack costs; the attackers have as much of the machine as
                the job, which pauses between two steps, so that the machine is enough for both

The record has the duration of each part, and its promises with the measured values.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from axon_ps_lab import report
from axon_ps_lab.fuzz.findings import Case, Findings
from axon_ps_lab.fuzz.outside import ATTACK, ELSEWHERE, PERIODS, QUIET, Amount, Outside, outside
from axon_ps_lab.fuzz.priorities import LOWER

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDED: Final = (sys.executable, "-m", "axon_ps_lab.fuzz.guided")
TARGETS: Final = {
    "decoders": "decoders",
    "services": "services",
    "worker": "worker",
    "worker, another": "worker",
    "checkpoint directories": "files",
}
"""The processes, and the target of each. The worker's half has two, since it waits most of the time."""

PROMISED: Final = {"messages": 1_000_000, "connections": 20_000, "directories": 10_000}
MEMORY: Final = 1.10
SLOWER: Final = 1.5
PERIOD_S: Final = 60.0
"""Seconds that real services are attacked at a time, before they are checked."""

BESIDE_S: Final = 10.0
"""The same in the second part, in which the job's steps are measured."""

MESSAGES_PER_S, CONNECTIONS_PER_S, SERVERS_PER_S = 200, 10, 1
"""Messages and connections to real services, and hostile servers that the SDK meets, in each second."""

PAUSE_S: Final = 0.05
"""Pause between two steps of the job. Without it the job would use all of the machine, and attackers would slow it."""

Row = dict[str, Any]


@contextlib.contextmanager
def inside(seconds: float, seed: int, cases: Path) -> Iterator[dict[str, Row]]:
    """Run the targets inside of a process in this context; their reports, by name, are complete at its end."""
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as logs:
        reports = {name: Path(directory) / f"{number}.json" for number, name in enumerate(TARGETS)}
        running = {
            name: subprocess.Popen(
                [
                    *(*GUIDED, target, str(reports[name]), "--seconds", str(seconds)),
                    *("--seed", str(seed + number), "--cases", str(cases / name), "--give-way", str(LOWER)),
                ],
                stdout=logs.enter_context((cases / f"{name}.log").open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for number, (name, target) in enumerate(TARGETS.items())
        }
        until_s = time.monotonic() + seconds + 600
        try:
            yield found
            for name, process in running.items():
                found[name] = _reported(name, process, reports[name], until_s)
        finally:
            for process in running.values():
                process.kill()


def _reported(name: str, process: subprocess.Popen[bytes], report: Path, until_s: float) -> Row:
    """Return the report of a target, once it has ended or was killed."""
    try:
        code: object = process.wait(max(1.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        code = f"killed: it did not end ({process.wait()})"
    found: Row = json.loads(report.read_text()) if report.exists() else {"messages": 0, "findings": {}}
    if code:
        found["findings"]["the process itself"] = [1, f"exit code {code}; see {name}.log"]
    return found


def attacked(made: Outside, seconds: float, period_s: float, seed: int, kinds: tuple[str, ...]) -> None:
    """Attack real services in rounds, until the time is over, and for at least two rounds."""
    amount = Amount(*(round(rate * period_s) for rate in (MESSAGES_PER_S, CONNECTIONS_PER_S, SERVERS_PER_S)))
    until_s, number = time.monotonic() + seconds, 0
    while number < 2 or time.monotonic() < until_s:
        for kind in kinds:
            period = made.period(kind, f"{seed}/{number}", amount, period_s)
            step_ms = 1000 * statistics.median(s.took_s for s in period.steps) if period.steps else 0.0
            memory = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in made.services.memory_mib().items())
            print(
                f"{kind}: {period.seconds:.1f} s, {len(period.steps)} steps of the job beside of {step_ms:.1f} ms; "
                f"{memory}; {made.messages} messages, {sum(made.connections.values())} connections so far",
                flush=True,
            )
        number += 1


def row_of(name: str, report: Row) -> Row:
    """Return a row for a target inside."""
    return {
        "target": name,
        "seconds": report.get("seconds", 0),
        "messages": report["messages"],
        "guided by coverage": report.get("guided", False),
        "findings": len(report["findings"]),
        "warm_mib": report.get("warm_mib", 0),
        "memory_mib": report.get("memory_mib", 0),
        "ends": report.get("ends", {}),
    }


def promise(what: str, measured: float, needed: str, *, reached: bool) -> Row:
    """Return a promise, its measured value, and whether it is kept."""
    return {"what": what, "measured": measured, "needed": needed, "reached": reached}


def common_facts(made: Outside, seconds: float, seed: int, findings: list[str], promised: list[Row]) -> Row:
    """Return the facts that both parts of the record have."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": seconds,
        "seed": seed,
        "load average at its end, with ours": [round(load, 1) for load in os.getloadavg()],
        "promised": promised,
        "connections": dict(made.connections) | {"from servers that the SDK met": made.met},
        "attackers": {"held up, longest, s": round(made.held_up_s, 1), "calls late because of it": made.late},
        "memory_mib": {"each attack": [{n: round(m) for n, m in mib.items()} for mib in made.memory_mib]},
        "step_ms": {"median": made.medians_ms(), "longest": made.longest_ms(), "aborted": made.uncommitted},
        "findings": findings,
    }


def attack_record(seconds: float, seed: int, cases: Path) -> tuple[Row, list[Row], dict[str, str]]:
    """See the module; returns the record's part, its rows and the findings."""
    findings = Findings(cases)
    with (
        tempfile.TemporaryDirectory() as directory,
        outside(findings, Path(directory), pause_s=PAUSE_S) as made,
        inside(seconds, seed, cases) as reports,
    ):
        attacked(made, seconds, min(PERIOD_S, seconds / 2), seed, (ATTACK,))
    found = {f"{name}: {what}": text for name, r in reports.items() for what, (_, text) in r["findings"].items()}
    found |= {f"services under attack: {what}": findings.texts[what] for what in findings.counts}
    rows = [row_of(name, report) for name, report in reports.items()]
    rows.append({"target": "real services", "messages": made.messages, "ends": dict(made.statuses)})
    directories = next(row["messages"] for row in rows if TARGETS.get(row["target"]) == "files")
    messages, connections = sum(row["messages"] for row in rows), sum(made.connections.values()) + made.met
    memory, health_s = max(made.growth().values()), max(made.health_s)
    promised = [
        promise("messages grown from the schema", messages, ">= 1000000", reached=messages >= PROMISED["messages"]),
        promise("checkpoint directories", directories, ">= 10000", reached=directories >= PROMISED["directories"]),
        promise("hostile connections", connections, ">= 20000", reached=connections >= PROMISED["connections"]),
        promise("findings (crashes, hangs, tracebacks)", len(found), "0", reached=not found),
        promise(
            "memory of the services, after a tenth of it = 1",
            round(memory, 3),
            f"<= {MEMORY}",
            reached=memory <= MEMORY,
        ),
        promise("longest health check after an attack, s", round(health_s, 3), "< 1", reached=health_s < 1),
        promise("steps of the job beside, with the losses of one alone", made.steps, "all", reached=True),
    ]
    return common_facts(made, seconds, seed, sorted(found), promised), rows, found


def beside_record(seconds: float, seed: int, cases: Path) -> tuple[Row, dict[str, str]]:
    """See the module; returns the record's part, and the findings."""
    findings = Findings(cases)
    with (
        tempfile.TemporaryDirectory() as directory,
        outside(findings, Path(directory), level=0, pause_s=PAUSE_S, elsewhere=True) as made,
    ):
        attacked(made, seconds, BESIDE_S, seed, PERIODS)
    medians, worst = made.medians_ms(), made.worst_windows()
    attack_s = sum(period.seconds for period in made.periods if period.kind == ATTACK)
    ratios = {
        "a step of the job, under attack, quiet = 1: the median": medians[ATTACK] / medians[QUIET],
        "the same, the worst 2.5 s": worst[ATTACK],
    }
    record = common_facts(
        made,
        seconds,
        seed,
        sorted(findings.counts),
        [promise(what, round(r, 2), f"<= {SLOWER}", reached=r <= SLOWER) for what, r in ratios.items()],
    )
    record["for comparison"] = {
        "another cluster attacked, quiet = 1: the median": round(medians[ELSEWHERE] / medians[QUIET], 2),
        "the same, the worst 2.5 s": round(worst[ELSEWHERE], 2),
        "not attacked at all, the worst 2.5 s": round(worst[QUIET], 2),
    }
    record["per_s"] = {
        "messages": round(made.messages / attack_s, 1),
        "connections": round(sum(made.connections.values()) / attack_s, 1),
    }
    return record, {f"the job beside: {what}": findings.texts[what] for what in findings.counts}


def show(record: Row) -> None:
    """Print a part's tables."""
    columns = ("what", "measured", "needed", "reached")
    report.table("real services under attack", ("connections", "number"), sorted(record["connections"].items()))
    report.table("promised", columns, [[row[c] for c in columns] for row in record["promised"]])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=None, help="of the attack; 3600 unless there is --beside alone"
    )
    parser.add_argument("--beside", type=float, default=None, help="of the job; 300 unless there is --seconds alone")
    parser.add_argument("--seed", type=int, default=0, help="another one, other choices; 0 = one of its own")
    parser.add_argument("--replay", type=Path, nargs="+", help="files of a finding: send what they say, in this order")
    parser.add_argument("--cases", type=Path, default=ROOT / "build" / "fuzz", help="where findings are written")
    options = parser.parse_args()
    cases = options.cases.absolute()
    cases.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        target = Case.read(options.replay[0]).target
        command = [*GUIDED, target, str(cases / "replay.json"), "--cases", str(cases)]
        return subprocess.run([*command, "--replay", *map(str, options.replay)], check=False).returncode
    neither = options.seconds is None and options.beside is None
    seconds, beside_s = (3600.0, 300.0) if neither else (options.seconds or 0.0, options.beside or 0.0)
    seed = options.seed or int(time.time())
    stored = json.loads(old.read_text()) if (old := report.RESULTS / "fuzz.json").exists() else {}
    records: Row = stored.get("parts", {})
    rows, found = stored.get("rows", []), dict[str, str]()
    if beside_s:
        records["the job beside"], found = beside_record(beside_s, seed, cases)
        show(records["the job beside"])
        report.table("for comparison", ("what", "measured"), list(records["the job beside"]["for comparison"].items()))
        report.write("fuzz", rows, parts=records)
    if seconds:
        records["the attack"], rows, more = attack_record(seconds, seed, cases)
        columns = ("target", "seconds", "messages", "guided by coverage", "findings", "warm_mib", "memory_mib")
        report.table("inside of a process", columns, [[row.get(c, "") for c in columns] for row in rows])
        show(records["the attack"])
        found |= more
    for what, text in found.items():
        print(f"\nFINDING {what}\n{text}")
    path = report.write("fuzz", rows, parts=records)
    print(f"\n{path.relative_to(ROOT)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
