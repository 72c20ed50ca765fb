"""The table of metrics: for every number of a `.statistics()` its name, its kind and its meaning.

A statistic without a row is exported as `axon_ps_undescribed`, and fails `tests/unit/observe/test_metrics_table.py`.

Note: [Names]
    Names follow Prometheus: `axon_ps_`, the subject, a unit at the end (bytes, seconds). Counters end in `_total`,
    which is added when they are written. A statistic "model/NAME/x" is x of one model, and a metric of its own, so
    that adding up counts nothing twice. "worker/3/x" is x of a member, as the coordinator sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its name, with its unit, without `_total`.
        help: description of the count or measure.
        is_counter: whether it only grows while the process lives; else it is a gauge.
    """

    name: str
    help: str
    is_counter: bool


def _counter(name: str, text: str) -> Metric:
    return Metric(f"axon_ps_{name}", text, True)


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"axon_ps_{name}", text, False)


_SHARD: Final = {
    "bytes_in": _counter("shard_received_bytes", "Payload of gradients from workers, however it travelled."),
    "bytes_out": _counter("shard_sent_bytes", "Payload of parameters to workers, however it travelled."),
    "mapped_bytes_in": _counter("shard_mapped_received_bytes", "Of the received, added where a worker had them."),
    "bytes_forwarded": _counter("shard_forwarded_bytes", "Payload of sums forwarded to backups."),
    "bytes_followed": _counter("shard_followed_bytes", "Payload of sums got from primaries."),
    "bytes_copied_in": _counter("shard_copied_received_bytes", "Payload of slices copied from another server."),
    "bytes_copied_out": _counter("shard_copied_sent_bytes", "Payload of slices copied to another server."),
    "corruptions": _counter("shard_corruptions", "Blocks of memory that did not hold what was written to them."),
    "chunks_in": _counter("shard_received_chunks", "Chunks of gradients."),
    "chunks_out": _counter("shard_sent_chunks", "Chunks of parameters."),
    "copies": _counter("shard_model_copies", "Steps that took another model's values."),
    "duplicates": _counter("shard_duplicate_chunks", "Chunks that were there already and were dropped."),
    "encodings": _counter("shard_encodings", "Chunks encoded for the wire; once a version, for all workers."),
    "gathers": _counter("shard_gathers", "Gathers served."),
    "pushes": _counter("shard_pushes", "Pushes taken."),
    "restores": _counter("shard_restores", "Times that the parameters were replaced."),
    "steps_committed": _counter("shard_steps_committed", "Steps applied."),
    "steps_aborted": _counter("shard_steps_aborted", "Steps whose gradients were dropped."),
    "steps_skipped": _counter("shard_steps_skipped", "Steps whose gradients were not finite."),
    "waits": _counter("shard_push_waits", "Chunks that waited for the turn of their replica."),
    "queued": _counter("shard_push_queued", "Chunks that were kept until the turn of their replica."),
    "published_pulls": _counter("shard_published_pulls", "Versions sent to subscribers."),
    "published_encodings": _counter("shard_published_encodings", "Slices encoded for subscribers; once a version."),
    "published_comparisons": _counter("shard_published_comparisons", "Slices compared for differences."),
    "published_chunks_out": _counter("shard_published_chunks", "Chunks sent to subscribers."),
    "published_bytes_out": _counter("shard_published_sent_bytes", "Payload sent to subscribers."),
    "published": _counter("shard_published_versions", "Versions published to subscribers."),
    "published_dropped": _counter("shard_published_dropped_versions", "Of these, those that were given up early."),
    "leased_bytes_forwarded": _counter("shard_leased_forwarded_bytes", "Of the forwarded, through no socket."),
    "master_bytes": _gauge("shard_master_bytes", "Memory of the parameters."),
    "accumulator_bytes": _gauge("shard_accumulator_bytes", "Memory of the sums of gradients."),
    "queued_bytes": _gauge("shard_queued_bytes", "Memory of gradients that came before their turn."),
    "state_bytes": _gauge("shard_optimizer_state_bytes", "Memory of the optimizer's state."),
    "residual_bytes": _gauge(
        "shard_residual_bytes", "Memory of the residuals of compressed parameters, or of what was sent."
    ),
    "frame_bytes": _gauge("shard_frame_bytes", "Memory of parameters encoded for the wire."),
    "shared_bytes": _gauge("shard_shared_bytes", "Memory that workers of this host map."),
    "generation": _gauge("shard_generation", "Number of the membership that this server is in."),
    "step": _gauge("shard_step", "The current step attempt of the first model."),
    "version": _gauge("shard_version", "Committed steps of the first model."),
    "slices": _gauge("shard_slices", "Slices that it holds."),
    "primary_slices": _gauge("shard_primary_slices", "Slices that it serves."),
    "missing_chunks": _gauge("shard_missing_chunks", "Chunks that the current step still waits for."),
    "lacking_chunks": _gauge("shard_lacking_chunks", "Chunks of parameters that it does not have yet."),
    "collective_collectives": _counter("shard_collectives", "Collectives that began here."),
    "collective_messages": _counter("shard_collective_messages", "Messages between workers."),
    "collective_failures": _counter("shard_collective_failures", "Groups that lost a member."),
    "collective_pending_bytes": _gauge("shard_collective_pending_bytes", "Memory of inputs that wait for others."),
    "collective_sums_bytes": _gauge("shard_collective_sums_bytes", "Memory of results under way."),
    "collective_queued_bytes": _gauge("shard_collective_queued_bytes", "Memory of results to be sent."),
    "collective_mailbox_bytes": _gauge("shard_collective_mailbox_bytes", "Memory of messages to be fetched."),
    "collective_peak_bytes": _gauge("shard_collective_peak_bytes", "Most memory that collectives had."),
    "collective_groups": _gauge("shard_collective_groups", "Groups with anything under way."),
    "collective_streams": _gauge("shard_collective_streams", "Streams in operations."),
}

_WIRE: Final = {
    "bytes_in": _counter("worker_received_bytes", "Payload of parameters from servers, however it travelled."),
    "bytes_out": _counter("worker_sent_bytes", "Payload of gradients to servers, however it travelled."),
    "leased_bytes_in": _counter("worker_leased_received_bytes", "Of the received, through no socket."),
    "leased_bytes_out": _counter("worker_leased_sent_bytes", "Of the sent, through no socket."),
    "mapped_bytes_in": _counter("worker_mapped_received_bytes", "Of the received, mapped without a copy."),
    "chunks_in": _counter("worker_received_chunks", "Chunks of parameters."),
    "chunks_out": _counter("worker_sent_chunks", "Chunks of gradients."),
    "gathers": _counter("worker_gathers", "Gathers from a server."),
    "pushes": _counter("worker_pushes", "Pushes to a server."),
    "uploads": _counter("worker_uploads", "Uploads of first values to a server."),
    "retries": _counter("worker_retries", "Calls that were resumed or repeated."),
    "residual_bytes": _gauge("worker_residual_bytes", "Memory of the residuals of compressed gradients."),
    "received_bytes": _gauge("worker_received_copy_bytes", "Memory of parameters that differences are added to."),
    "mismatches": _counter("worker_mismatches", "Digests of parameters that did not fit; gathered in full then."),
    "clock": _gauge("worker_clock", "Own decided steps in this generation, where replicas step asynchronously."),
    "slowest_clock": _gauge("worker_slowest_clock", "The same of the slowest replica."),
    "staleness_wait_s": _counter("worker_staleness_wait_seconds", "Waited for the slowest replica."),
    "votes": _counter("worker_votes", "Steps that this worker voted on."),
    "decision_wait_s": _counter("worker_decision_wait_seconds", "Waited for decisions, that is, for other replicas."),
}

_OPERATIONS: Final = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
    "refusal",
)  # fmt: skip

_WORKER: Final = _WIRE | {
    name: metric
    for operation in _OPERATIONS
    for name, metric in (
        (f"{operation}_calls", _counter(f"worker_{operation}_calls", f"Collectives that ended: {operation}.")),
        (f"{operation}_s", _counter(f"worker_{operation}_seconds", f"Time in collectives: {operation}.")),
    )
}

_COORDINATOR: Final = {
    "generation": _gauge("generation", "Number of the current membership."),
    "workers": _gauge("workers", "Workers that are members."),
    "shards": _gauge("shards", "Shard servers that are members."),
    "nodes": _gauge("nodes", "Nodes that have a member."),
    "draining": _gauge("draining_shards", "Shard servers that give up what they hold."),
    "complete": _gauge("complete", "1 while every member that the job needs is there."),
    "training": _gauge("training", "1 while steps commit."),
    "stalled": _gauge("stalled", "1 while every member is there and no step commits any more."),
    "leads": _gauge("leads", "1 while this coordinator leads; 0 on a standby, which has no other number."),
    "uptime_s": _gauge("coordinator_uptime_seconds", "Since when this coordinator leads."),
    "replication": _gauge("replication", "How many shard servers are to hold each slice."),
    "pending": _gauge("pending", "What the job waits for: steps, barriers, checkpoints."),
    "longest_wait_s": _gauge("longest_wait_seconds", "How long workers have waited for others in the current step."),
    "kv_keys": _gauge("kv_keys", "Keys in the job's store."),
    "last_grad_norm": _gauge("grad_norm", "Norm of the last gradient of the first model."),
    "steps_committed": _counter("steps_committed", "Steps that committed."),
    "steps_skipped": _counter("steps_skipped", "Steps whose gradients were not finite."),
    "steps_aborted": _counter("steps_aborted", "Steps that a change of members or a disagreement ended."),
    "joins": _counter("joins", "Members that joined."),
    "leaves": _counter("leaves", "Members that left."),
    "losses": _counter("losses", "Members that were lost: killed, cut off or silent."),
    "steps_deadlocked": _counter("steps_deadlocked", "Steps ended since workers waited for each other's models."),
    "staleness_sum": _counter("staleness_versions", "Versions that asynchronous steps were behind, added up."),
    "staleness_max": _gauge("staleness_max_versions", "The most that one was behind."),
    "set_aside": _counter("workers_set_aside", "Workers that took no part in a step for too long."),
    "cut_off": _counter("members_cut_off", "Members that others could not reach, and that the job went on without."),
    "copies": _counter("model_copies", "Steps that took another model's values."),
    "models_released": _counter("models_released", "Models that were given up."),
    "slices_copied": _counter("slices_copied", "Slices of which another copy was made."),
    "slices_corrupted": _counter("slices_corrupted", "Slices that a server has lost since its memory failed."),
    "version": _gauge("version", "Committed steps of a model, since its first."),
    "step": _gauge("step", "The current step attempt of a model."),
    "steps_per_s": _gauge("steps_per_second", "Steps of a model that commit, over whole steps; 0 = unknown, or none."),
    "epoch": _gauge("epoch", "How often a model's parameters were replaced from a checkpoint."),
    "parameters": _gauge("parameters", "Elements of a model."),
    "slices": _gauge("slices", "Slices of a model."),
    "lacking": _gauge("slices_lacking_copies", "Slices of a model that fewer servers hold than are to."),
    "initialized": _gauge("initialized", "1 while the shard servers hold a model's parameters."),
    "silent_s": _gauge("member_silence_seconds", "Since when a member was not heard; it is lost after its lease."),
    "audit_lost": _counter("audit_lost_lines", "Lines of the audit log that could not be written."),
    "lease_s": _gauge("lease_seconds", "How long a member may be silent."),
    "checkpoint_version": _gauge("checkpoint_version", "Version of the newest checkpoint; 0 = none is known."),
    "checkpoint_age_s": _gauge("checkpoint_age_seconds", "Age of the newest checkpoint."),
    "checkpoint_took_s": _gauge("checkpoint_duration_seconds", "How long writing it took."),
    "checkpoint_bytes": _gauge("checkpoint_bytes", "Bytes of its files."),
    "checkpoint_failed": _gauge("checkpoint_failed", "1 while the newest failure is newer than the newest checkpoint."),
}

_FSDP: Final = {
    "gathers": _counter("fsdp_gathers", "Units gathered."),
    "host_gathers": _counter("fsdp_host_gathers", "Of these, from the copy on the host."),
    "gathers_repeated": _counter("fsdp_gathers_repeated", "Units gathered again, since they changed meanwhile."),
    "gathered_bytes": _counter("fsdp_gathered_bytes", "Bytes of units gathered."),
    "pushed_bytes": _counter("fsdp_pushed_bytes", "Bytes of gradients pushed."),
    "gather_wait_s": _counter("fsdp_gather_wait_seconds", "Forward and backward waited for parameters."),
    "push_wait_s": _counter("fsdp_push_wait_seconds", "Steps waited for pushes."),
    "step_wait_s": _counter("fsdp_step_wait_seconds", "Steps waited for their decisions."),
    "forwards_repeated": _counter("fsdp_forwards_repeated", "Forwards made again."),
    "steps_committed": _counter("fsdp_steps_committed", "Steps that committed."),
    "steps_not_committed": _counter("fsdp_steps_not_committed", "Steps that were aborted or skipped."),
    "param_memory_bytes": _gauge("fsdp_param_memory_bytes", "Memory of parameters."),
    "peak_param_memory_bytes": _gauge("fsdp_peak_param_memory_bytes", "The most of it."),
    "grad_buffer_bytes": _gauge("fsdp_grad_buffer_bytes", "Memory of gradients on their way."),
    "peak_grad_buffer_bytes": _gauge("fsdp_peak_grad_buffer_bytes", "The most of it."),
    "peak_memory_bytes": _gauge("fsdp_peak_memory_bytes", "The most of both."),
}

_DDP: Final = {
    "rounds": _counter("ddp_reductions", "Reductions of all gradients."),
    "reduced_bytes": _counter("ddp_reduced_bytes", "Bytes of gradients in them, uncompressed."),
    "wait_s": _counter("ddp_wait_seconds", "Backward waited at its end for reductions."),
    "rebuilt": _counter("ddp_bucket_rebuilds", "Times that buckets were cut anew."),
    "buckets": _gauge("ddp_buckets", "Buckets of gradients."),
}

_DILOCO: Final = {
    "inner_steps": _counter("diloco_inner_steps", "Steps of the inner optimizer."),
    "inner_steps_committed": _counter(
        "diloco_inner_steps_committed", "Those whose progress is in the job's parameters, times their weights."
    ),
    "outer_steps_committed": _counter("diloco_outer_steps_committed", "Outer steps that committed."),
    "outer_steps_not_committed": _counter("diloco_outer_steps_not_committed", "Outer steps that did not."),
    "outer_steps_due": _counter(
        "diloco_outer_steps_due", "Outer steps begun with fewer inner steps, since a quorum waited."
    ),
    "pulls": _counter("diloco_pulls", "Pulls of the parameters."),
    "rebases": _counter("diloco_rebases", "Outer steps of others that were taken, with progress retained."),
    "anchor_bytes": _gauge("diloco_anchor_bytes", "Memory of the copy at the last synchronization."),
    "peak_push_buffer_bytes": _gauge("diloco_peak_push_buffer_bytes", "Most memory of pushes."),
}

_GROUP: Final = {
    "calls": _counter("group_calls", "Collectives in shared memory."),
    "bytes_inline": _counter("group_inline_bytes", "Payload beside the headers of small calls."),
    "bytes_mapped": _counter("group_mapped_bytes", "Payload found in shared arrays of other processes."),
    "bytes_sent": _counter("group_sent_bytes", "Payload of messages sent."),
    "bytes_received": _counter("group_received_bytes", "Payload of messages received."),
    "waits": _counter("group_waits", "Waits for other ranks."),
    "sleeps": _counter("group_sleeps", "Of these, those that slept."),
    "gloo_message_bytes_sent": _counter("group_gloo_sent_bytes", "Payload of messages sent over gloo."),
    "uploaded_bytes": _counter("group_uploaded_bytes", "Copied from the host to a device."),
    "downloaded_bytes": _counter("group_downloaded_bytes", "Copied from a device to the host."),
    "bytes_in": _counter("group_wire_received_bytes", "Payload from servers, of all groups of the process."),
    "bytes_out": _counter("group_wire_sent_bytes", "Payload to servers, of all groups of the process."),
    "messages_in": _counter("group_wire_received_messages", "Messages from servers, of all groups of the process."),
    "messages_out": _counter("group_wire_sent_messages", "Messages to servers, of all groups of the process."),
}

_PROCESS: Final = {
    "spans_recorded": _counter("trace_spans", "Spans of sampled steps that were recorded."),
    "spans_exported": _counter("trace_exported_spans", "Of these, those that a collector took."),
    "spans_failed": _counter("trace_failed_spans", "Of these, those that no collector took."),
    "spans_dropped": _counter("trace_dropped_spans", "Of these, those for which the queue had no room."),
    "loop_lag_s": _gauge("loop_lag_seconds", "How long the event loop took to come to a task that was ready."),
}

TABLE: Final[Mapping[str, Mapping[str, Metric]]] = {
    "coordinator": _COORDINATOR,
    "shard": _SHARD,
    "worker": _WORKER,
    "fsdp": _FSDP,
    "ddp": _DDP,
    "diloco": _DILOCO,
    "group": _GROUP,
    "process": _PROCESS,
}
"""Metrics, by kind of source, and by statistic."""

HISTOGRAMS: Final[Mapping[str, Mapping[str, Metric]]] = {
    "worker": {
        "step": _gauge("worker_step_seconds", "From the end of a step of this worker's to that of the next."),
        "gather": _gauge("worker_gather_seconds", "Gathers of a unit, from the request until all of it is there."),
        "push": _gauge("worker_push_seconds", "Pushes of a unit's gradient, until all servers have it."),
        "vote": _gauge("worker_vote_seconds", "From a vote to the decision on it."),
    },
    "coordinator": {"step": _gauge("step_seconds", "From a decision on a step to the next; of all models.")},
}
"""Histograms of durations, by kind of source, and by name. `worker_vote_seconds_sum` equals `decision_wait_s`."""

_MEMBERS: Final = ("worker", "shard")


def described(source: str, statistic: str) -> tuple[Metric, dict[str, str]] | None:
    """Return the metric of a statistic, and the labels in its name; None when it is not described.

    Args:
        source: a key of `TABLE`.
        statistic: a key of the result of `.statistics()`.
    """
    head, _, rest = statistic.partition("/")
    subject, _, name = rest.rpartition("/")
    rows = TABLE[source]
    if head == "model" and name in rows:
        row = rows[name]
        return replace(row, name=row.name.replace("axon_ps_", "axon_ps_model_", 1)), {"model": subject}
    if source == "coordinator" and head in _MEMBERS and name in rows:
        return rows[name], {"member": head, "member_rank": subject}
    return (rows[statistic], {}) if statistic in rows else None


REPEATED: Final = "wire_"
"""A wrapper's statistics that begin with this repeat the worker's, and are not metrics of their own."""
