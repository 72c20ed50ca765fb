"""`make fuzz`: all targets for a while; a table, and benchmarks/results/fuzz.json.

    make fuzz FUZZ_ARGS="--seconds 3600"

Half of the time the targets inside of a process, guided by coverage, each in one of its own, side by side; the other
half real services under attack, in turns. The record says how long it was, and what was promised and is not reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks")]

import _report  # noqa: E402
from findings import Case, Findings  # noqa: E402
from outside import ATTACK, ELSEWHERE, QUIET, TURNS, Amount, Outside, outside  # noqa: E402

TARGETS: Final = ("decoders", "services", "worker")
PROMISED: Final = {"messages": 1_000_000, "connections": 20_000}
MEMORY: Final = 1.10
SLOWER: Final = 1.5
QUIET_S: Final = 5.0


def inside(seconds: float, seed: int, cases: Path) -> dict[str, Any]:
    """The targets inside of a process; their reports, by name."""
    with tempfile.TemporaryDirectory() as directory:
        reports = {name: Path(directory) / f"{name}.json" for name in TARGETS}
        logs = {name: (cases / f"{name}.log").open("w") for name in TARGETS}
        running = {
            name: subprocess.Popen(
                [
                    *(sys.executable, str(HERE / "guided.py"), name, str(report), "--seconds", str(seconds)),
                    *("--seed", str(seed), "--cases", str(cases / name)),
                ],
                stdout=logs[name],
                stderr=subprocess.STDOUT,
            )
            for name, report in reports.items()
        }
        found = {}
        for name, process in running.items():
            try:
                code: object = process.wait(seconds + 300)
            except subprocess.TimeoutExpired:
                process.kill()
                code = f"killed: it did not end ({process.wait()})"
            report = reports[name]
            found[name] = json.loads(report.read_text()) if report.exists() else {"messages": 0, "findings": {}}
            if code:
                found[name]["findings"]["the process itself"] = [1, f"exit code {code}; see {name}.log"]
        for log in logs.values():
            log.close()
        return found


def attacked(seconds: float, seed: int, findings: Findings) -> Outside:
    """Real services, until the time is over, and at least two rounds."""
    with tempfile.TemporaryDirectory() as directory, outside(findings, Path(directory)) as made:
        until_s, number = time.monotonic() + seconds, 0
        while number < 2 or time.monotonic() < until_s:
            for kind in TURNS:
                turn = made.turn(kind, f"{seed}/{number}", Amount(600, 2500, 100), QUIET_S)
                memory = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in made.services.memory_mib().items())
                print(f"{kind}: {turn.seconds:.1f} s, {len(turn.steps)} steps of the job beside; {memory}", flush=True)
            number += 1
    return made


def rows_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each target inside."""
    return [
        {
            "target": name,
            "seconds": r.get("seconds", 0),
            "messages": r["messages"],
            "guided by coverage": r.get("guided", False),
            "findings": len(r["findings"]),
            "warm_mib": r.get("warm_mib", 0),
            "memory_mib": r.get("memory_mib", 0),
            "ends": r.get("ends", {}),
        }
        for name, r in made.items()
    ]


def promises(rows: list[dict[str, Any]], made: Outside, findings: int) -> list[list[object]]:
    """What was promised, what came of it, and whether that is enough."""
    messages = made.messages + sum(row["messages"] for row in rows)
    connections = sum(made.connections.values()) + made.met
    memory = max(now / made.warm_mib[name] for name, now in made.memory_mib.items())
    medians = made.medians_ms()
    slower = medians[ATTACK] / medians[QUIET]
    aside = medians[ATTACK] / medians[ELSEWHERE]
    health_s = max(made.health_s)
    return [
        ["messages grown from the schema", messages, f">= {PROMISED['messages']}", messages >= PROMISED["messages"]],
        ["hostile connections", connections, f">= {PROMISED['connections']}", connections >= PROMISED["connections"]],
        ["findings (crashes, hangs, tracebacks)", findings, "0", findings == 0],
        ["memory of the services, after the first attack = 1", round(memory, 3), f"<= {MEMORY}", memory <= MEMORY],
        ["a step of the job beside, quiet = 1", round(slower, 2), f"<= {SLOWER}", slower <= SLOWER],
        ["the same, others of the machine attacked = 1", round(aside, 2), f"<= {SLOWER}", aside <= SLOWER],
        ["longest health check after an attack, s", round(health_s, 3), "< 1", health_s < 1],
        ["steps of the job beside, with the losses of one that is alone", made.steps, "all", True],
    ]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all; what it needs to begin and end is more")
    parser.add_argument("--seed", type=int, default=0, help="another one, other choices; 0 = one of its own")
    parser.add_argument("--replay", type=Path, help="a file of a finding: send what it says, and show what comes of it")
    parser.add_argument("--cases", type=Path, default=ROOT / "build" / "fuzz", help="where findings are written")
    options = parser.parse_args()
    options.cases.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        name = Case.read(options.replay).target
        report = options.cases / "replay.json"
        replay = [sys.executable, str(HERE / "guided.py"), name, str(report), "--replay", str(options.replay)]
        return subprocess.run([*replay, "--unguided"], check=False).returncode
    seed = options.seed or int(time.time())
    made = inside(options.seconds / 2, seed, options.cases)
    findings = Findings(options.cases)
    services = attacked(options.seconds / 2, seed, findings)
    found = {f"{name}: {what}": text for name, r in made.items() for what, (_, text) in r["findings"].items()}
    found |= {f"services under attack: {what}": findings.texts[what] for what in findings.counts}
    rows = rows_of(made)
    total = promises(rows, services, len(found))
    calls = {"target": "real services", "messages": services.messages, "ends": dict(services.statuses)}
    columns = ("target", "seconds", "messages", "guided by coverage", "findings", "warm_mib", "memory_mib")
    _report.table("inside of a process", columns, [[row[c] for c in columns] for row in rows])
    _report.table("real services under attack", ("connections", "number"), sorted(services.connections.items()))
    _report.table("promised", ("what", "measured", "needed", "reached"), total)
    for what, text in found.items():
        print(f"\nFINDING {what}\n{text}")
    path = _report.write(
        "fuzz",
        [*rows, calls],
        seconds=options.seconds,
        seed=seed,
        promised=[dict(zip(("what", "measured", "needed", "reached"), row, strict=True)) for row in total],
        connections=dict(services.connections)
        | {"from servers that the SDK met": services.met, "to services beside (not counted)": services.elsewhere},
        memory_mib={"warm": services.warm_mib, "end": services.memory_mib},
        step_ms={"median": services.medians_ms(), "longest": services.longest_ms(), "aborted": services.uncommitted},
        findings=sorted(found),
    )
    print(f"\n{path.relative_to(ROOT)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
