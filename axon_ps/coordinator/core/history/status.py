"""The status of a job, for its users, and its numbers by name, as other engines report theirs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.history.history import History
from axon_ps.coordinator.core.kv import KeyValues
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.restart.comeback import Comeback
from axon_ps.types import Role
from axon_ps.wire.events import JobPhase, Status
from axon_ps.wire.report import REPORT_KEY, parse

_COUNTERS = ("steps_committed", "steps_skipped", "steps_aborted", "joins", "leaves", "losses")


class JobStatus:
    """Takes the status of one job.

    Args:
        config: its configuration.
        assembly: the members.
        models: the models.
        kv: has the report of the training script.
        comeback: the members that have not come back since the coordinator's restart.
        history: has rates and phase.
        pending: returns the reasons for which the job waits at a time, as text; empty ones do not count.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        assembly: Assembly,
        models: Models,
        kv: KeyValues,
        comeback: Comeback,
        history: History,
        pending: Callable[[float | None], Iterable[str]],
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._models = models
        self._kv = kv
        self._comeback = comeback
        self._history = history
        self._pending = pending

    def take(self, now: float | None, *, measures: bool) -> Status:
        """Return the current status; see `CoordinatorState.status`."""
        a, first, shards = self._assembly, self._models.first, self._assembly.shards()
        counters: dict[str, float] = {**a.counters, **self._models.norms(), "kv_keys": len(self._kv)}
        rates = {m.number: 0.0 if now is None else self._history.steps_per_s(now, m.number) for m in self._models}
        away = self._comeback.away()
        unknown = [member.rank for member in away if member.role is Role.SHARD]
        models = tuple(m.status(shards, self._config.copies, rates[m.number], unknown) for m in self._models.registered)
        report = parse(self._kv.peek(REPORT_KEY))
        rate = 0.0 if first is None else rates[first.number]
        if report is not None and first is not None:
            report = report.at_version(first.version, first.run_began, rate)
        counters |= a.roster.metrics() if measures else {}
        status = Status(
            job=self._config.job,
            membership=a.membership,
            version=0 if first is None else first.version,
            step=0 if first is None else first.step,
            registered=bool(models),
            initialized=all(m.state(shards).initialized for m in self._models),
            parameters=sum(m.parameters for m in models),
            lease_s=self._config.lease_s,
            counters=counters,
            pending=tuple(filter(None, self._pending(now))),
            models=models,
            replication=self._config.copies,
            draining=tuple(sorted(a.draining)),
            awaited=frozenset(member.incarnation for member in away),
            progress=report,
            steps_per_s=report.steps_per_s if report is not None and not models else rate,
        )
        return status if now is None else self._history.with_phase(status, now)

    def statistics(self, status: Status, now: float, longest_wait_s: float) -> dict[str, float]:
        """Return the numbers of a status; "model/NAME/x" is x of a model, "worker/3/x" of a member.

        Args:
            status: the status at `now`.
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
        for entry in self._assembly.roster:
            renewed_s = entry.deadline - status.lease_s
            values[f"{entry.member.role.value}/{entry.member.rank}/silent_s"] = max(0.0, now - renewed_s)
        return {name: float(value) for name, value in values.items()}
