"""The command `trace`: the next steps of a running job, as a file for Perfetto."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from axon_ps.cli import options as o
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.observe.tracing.chrome import MemberSpans
    from axon_ps.wire.v1 import trace_pb2

NEXT: Final = "next"
SKEW_S: Final = 0.05
"""Clocks that differ by more shift a member's rows visibly."""


@o.of_a_job
def trace(
    step: Annotated[str, typer.Option(help="The first step attempt: its number, or 'next'.")] = NEXT,
    steps: Annotated[int, typer.Option(help="How many steps.", min=1, max=100)] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="step-NUMBER.json")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model, where the job has several.")] = "",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the steps.", min=0.1, max=3600)] = 60.0,
    *,
    settings: Settings,
) -> None:
    """Record the next steps of a running job on all its members, as a file for https://ui.perfetto.dev."""
    from axon_ps.cli.operations import client

    first = _number(step)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigurationError(f"--output {output}: there is no directory {output.absolute().parent}")

    async def ask() -> trace_pb2.TraceReply:
        async with client(settings) as operator:
            return await operator.trace(first, steps, timeout_s, model=model)

    _write(asyncio.run(ask()), output)


def _number(step: str) -> int:
    if step == NEXT:
        return 0
    if not step.isdecimal() or not 0 < int(step) < 1 << 63:
        raise ConfigurationError(f"--step is {step!r}; it must be 'next', or the number of a step, 1 or more")
    return int(step)


def _write(reply: trace_pb2.TraceReply, output: Path | None) -> None:
    from axon_ps.coordinator.span_messages import report_from_proto
    from axon_ps.observe.tracing.chrome import chrome_trace, of_steps

    members = of_steps(map(report_from_proto, reply.reports), reply.first, reply.last)
    members.sort(key=_order)
    output = output or Path(f"step-{reply.first}.json")
    notes = {
        "first_step": reply.first,
        "last_step": reply.last,
        "missing": list(reply.missing),
        "clock_offsets_s": {one.member: round(one.offset_s, 6) for one in members},
    }
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(chrome_trace(members, notes), file)
        partial.replace(output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    for line in _summary(members):
        print(line)
    for lack in reply.missing:
        print(f"missing: {lack}")
    of = f"step {reply.first}" if reply.first == reply.last else f"steps {reply.first} to {reply.last}"
    print(f"{of}: {sum(len(one.spans) for one in members)} spans in {output}; open it at https://ui.perfetto.dev")


def _order(member: MemberSpans) -> tuple[int, int]:
    """Return the order of a member: coordinator, workers, shard servers, by rank."""
    role, _, rank = member.member.rpartition(" ")
    return ("coordinator", "worker", "shard server").index(role or member.member), int(rank) if role else 0


def _summary(members: list[MemberSpans]) -> list[str]:
    """Return the time of each kind of span, one line per member."""
    lines = []
    for one in members:
        totals: dict[str, float] = {}
        for span in one.spans:
            totals[span.name] = totals.get(span.name, 0.0) + span.duration_ns / 1e6
        took = ", ".join(f"{name} {ms:.1f} ms" for name, ms in totals.items())
        shifted = f"; its clock is {one.offset_s:+.2f} s off" if abs(one.offset_s) > SKEW_S else ""
        dropped = f"; {one.dropped} spans dropped" if one.dropped else ""
        failed = sum(bool(span.error) for span in one.spans)
        errors = f"; {failed} with errors" if failed else ""
        lines.append(f"{one.member}: {took or 'nothing recorded'}{errors}{dropped}{shifted}")
    return lines
