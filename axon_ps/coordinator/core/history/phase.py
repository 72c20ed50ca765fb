"""The phase of a job, for `status`, `top`, the page and the metrics. It is computed only here. Pure."""

from __future__ import annotations

import dataclasses
from typing import Final

from axon_ps.coordinator.core.roster import names_of
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.wire.events import JobPhase, Status

STALLED_S: Final = 10.0
"""A job whose next step has not committed for this long, and for the time of `STALLED_STEPS`, has stalled."""

STALLED_STEPS: Final = 5

FIRST_STEP_S: Final = 60.0
"""Seconds that a step may take while the duration of a step is unknown."""


def with_phase(status: Status, *, stepped: bool, step_s: float, since_s: float) -> Status:
    """Return a status with its phase and headline.

    Args:
        status: everything else.
        stepped: whether a step has committed since the membership is complete.
        step_s: seconds of a step; 0 = unknown.
        since_s: seconds without a committed step while the membership is complete.
    """
    phase = _phase(status, stepped=stepped, step_s=step_s, since_s=since_s)
    headline = _headline(phase, status, since_s)
    if phase is JobPhase.FINISHED:
        models = tuple(dataclasses.replace(model, steps_per_s=0.0) for model in status.models)
        return dataclasses.replace(status, phase=phase, headline=headline, steps_per_s=0.0, models=models)
    return dataclasses.replace(status, phase=phase, headline=", ".join([headline, *_flaws(status)]))


def _phase(status: Status, *, stepped: bool, step_s: float, since_s: float) -> JobPhase:
    if status.membership.is_over:
        return JobPhase.FINISHED
    if not status.membership.complete or status.awaited:
        return JobPhase.WAITING
    if not status.registered:
        return JobPhase.RUNNING
    if not status.initialized:
        return JobPhase.LOADING
    patience_s = max(STALLED_S, STALLED_STEPS * step_s) if stepped and step_s else FIRST_STEP_S
    if since_s > patience_s:
        return JobPhase.STALLED
    return JobPhase.TRAINING if stepped else JobPhase.READY


def _headline(phase: JobPhase, status: Status, since_s: float) -> str:
    count = len(status.membership.finished)
    workers = "its worker has" if count == 1 else f"all {count} workers have"
    return {
        JobPhase.FINISHED: f"finished: {workers} done all there was to do",
        JobPhase.WAITING: f"waiting for {_waits_for(status)}",
        JobPhase.RUNNING: "running, no model on the shard servers",
        JobPhase.READY: "ready to train",
        JobPhase.LOADING: "loading parameters",
        JobPhase.STALLED: f"no step has committed for {since_s:.0f} s",
        JobPhase.TRAINING: "training",
    }[phase]


def _waits_for(status: Status) -> str:
    membership = status.membership
    away = [m for m in (*membership.shards, *membership.workers) if m.incarnation in status.awaited]
    back = [f"{names_of(away)} to come back after the coordinator's restart"] if away else []
    return " and ".join([*([membership.waiting_for] if membership.waiting_for else []), *back]) or "members"


def _flaws(status: Status) -> list[str]:
    """Return troubles beside the phase, as text."""
    lacking = sum(model.lacking for model in status.models if model.initialized)
    slices = sum(model.slices for model in status.models)
    flaws = [f"{lacking} of {slices} slices lack copies"] if lacking else []
    outside = [m.rank for m in status.membership.workers if m.replica < 0]
    if outside and status.membership.complete:
        flaws.append(status.membership.why_no_replica(outside[0]) + (" and others" if len(outside) > 1 else ""))
    return flaws + ([f"shard server {format_ranks(status.draining)} is drained"] if status.draining else [])
