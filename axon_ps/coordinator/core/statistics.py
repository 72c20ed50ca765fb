"""The numbers of a job's status, by name, in the form in which the other engines report theirs. Pure."""

from __future__ import annotations

from axon_ps.coordinator.core.roster import Roster
from axon_ps.wire.events import JobPhase, Status

_COUNTERS = ("steps_committed", "steps_skipped", "steps_aborted", "joins", "leaves", "losses")


def statistics(status: Status, roster: Roster, now: float, longest_wait_s: float) -> dict[str, float]:
    """Return the numbers of a status; "model/NAME/x" is x of a model, "worker/3/x" of a member.

    Args:
        status: the status at `now`.
        roster: the members, with their leases.
        now: the time.
        longest_wait_s: seconds that workers have waited for others in the current step.
    """
    members, newest = status.membership, status.checkpoints
    failed = newest.failure and (not newest.uri or newest.failure_age_s < newest.age_s)
    values: dict[str, float] = {
        **dict.fromkeys(_COUNTERS, 0),
        **{name: value for name, value in status.counters.items() if "/" not in name},
        "generation": members.generation,
        "workers": len(members.workers),
        "shards": len(members.shards),
        "nodes": len({m.node for m in (*members.workers, *members.shards)}),
        "draining": len(status.draining),
        "complete": members.complete,
        "training": status.phase is JobPhase.TRAINING,
        "stalled": status.phase is JobPhase.STALLED,
        "leads": 1,
        "uptime_s": status.uptime_s,
        "replication": status.replication,
        "pending": len(status.pending),
        "longest_wait_s": longest_wait_s,
        "lease_s": status.lease_s,
        "checkpoint_version": newest.version,
        "checkpoint_age_s": newest.age_s,
        "checkpoint_took_s": newest.took_s,
        "checkpoint_bytes": newest.bytes,
        "checkpoint_failed": bool(failed),
    }
    for model in status.models:
        for name in ("version", "step", "epoch", "parameters", "slices", "lacking", "initialized", "steps_per_s"):
            values[f"model/{model.name or model.model}/{name}"] = getattr(model, name)
    for entry in roster:
        renewed_s = entry.deadline - status.lease_s
        values[f"{entry.member.role.value}/{entry.member.rank}/silent_s"] = max(0.0, now - renewed_s)
    return {name: float(value) for name, value in values.items()}
