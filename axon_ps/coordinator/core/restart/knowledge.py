"""The job as shard servers know it, for a coordinator whose state is older. Pure.

Note: [An older state]
    A coordinator may come back with an older state: from a restored copy, or from a journal that has lost its end. Its
    members know everything that it has announced since. So each returning process names the newest state of the job
    that it knows (`Position`). If that is newer than the state, a worker has to wait for a shard server, and a shard
    server is asked for its `Knowledge` before it is let in. The knowledge is written (`learned`), and the job goes on
    from it, in a generation that no member has seen. Attempts under way are aborted, and no committed step is lost.

    Only shard servers are believed, since they hold the parameters that the facts are about. Facts that no member knows
    are lost: values of the key-value store, and the drain of a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from axon_ps.coordinator.core import records
from axon_ps.errors import InvalidRequest
from axon_ps.storage.state_store.base import Record
from axon_ps.types import Decision, Member, Membership, ModelProgress, numbered
from axon_ps.wire.events import FIRST_VALUES, JobState, Position, RestoreOrder

MAX_GENERATIONS: Final = 1 << 32
"""Most generations by which a server's may be ahead of ours. A later one is refused."""


@dataclass(frozen=True, kw_only=True)
class ModelKnowledge:
    """A shard server's knowledge of a model.

    Attributes:
        state: with layout and optimizer, at the present version.
        step: the step attempt under way.
        decisions: the newest.
        restore: the newest order to restore it; None = there was none.
    """

    state: JobState
    step: int
    decisions: tuple[Decision, ...] = ()
    restore: RestoreOrder | None = None


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """A shard server's knowledge of the job.

    Attributes:
        membership: the newest.
        models: those that are registered.
        released: the numbers of those that were released.
        snapshot_id: of the newest order of a checkpoint.
        revoked: the revoked names, with reasons.
    """

    membership: Membership
    models: tuple[ModelKnowledge, ...] = ()
    released: frozenset[int] = frozenset()
    snapshot_id: int = 0
    revoked: Mapping[str, str]


def behind(ours: Position, theirs: Position) -> str:
    """Return a text about the knowledge that a process has and a state lacks; "" = none."""
    if theirs.generation > ours.generation:
        return f"generation {theirs.generation}, and the state ends with {ours.generation}"
    mine = {model.model: model for model in ours.models}
    for model in theirs.models:
        if model.model in ours.released:
            continue
        if (known := mine.get(model.model)) is None:
            return f"model {model.model}, which the state has not"
        for what in ("epoch", "version", "step", "placement"):
            if (there := getattr(model, what)) > (here := getattr(known, what)):
                return f"{what} {there} of model {model.model}, and the state ends with {here}"
            if what == "epoch" and there < here:
                break  # it was restored since
        else:
            if model.optimized and not known.optimized:
                return f"the optimizer of model {model.model}, and the state ends before it was registered"
            if model.initialized and not known.initialized:
                return f"all values of model {model.model}, and the state ends before that they were there"
    if gone := theirs.released - ours.released:
        return f"that model {min(gone)} was released"
    if theirs.snapshot_id > ours.snapshot_id:
        return f"checkpoint order {theirs.snapshot_id}, and the state ends with {ours.snapshot_id}"
    return ""


def check_known(known: Knowledge, state_id: str, generation: int) -> None:
    """Check that knowledge may belong to a job whose state has this id and this last generation.

    Raises:
        InvalidRequest: it cannot.
    """
    if known.membership.state_id != state_id:
        raise InvalidRequest("a shard server tells of another job, or of another state of it")
    if known.membership.generation > generation + MAX_GENERATIONS:
        raise InvalidRequest(
            f"a shard server tells of generation {known.membership.generation}, and the state ends with {generation}"
        )
    for theirs in known.models:
        if theirs.state.spec is None or theirs.state.placement is None:
            raise InvalidRequest(f"a shard server tells of model {theirs.state.model} without its layout")


def learned(stored: Mapping[str, bytes], known: Knowledge) -> list[Record]:
    """Return the records that bring a state up to a shard server's knowledge; see Note: [An older state].

    Raises:
        ConfigurationError: the state is not a coordinator's.
    """
    durable = records.load(stored)
    assert durable is not None
    changes: list[Record] = []
    for number in known.released & durable.models.keys():
        changes += records.deletions(number, durable.models.pop(number).decisions)
    for theirs in known.models:
        number = theirs.state.model
        model = _merged(durable.models.get(number, records.DurableModel()), theirs, known.membership.shards)
        durable.models[number] = model
        changes += _records_of(number, model)
    durable.next_model = max(durable.next_model, 1 + max((*durable.models, *known.released), default=0))
    durable.membership = membership = _membership(durable, known)
    vacant = durable.world_size - len(membership.workers) if membership.finished and membership.complete else 0
    return [
        *changes,
        records.models_record({n: model.name for n, model in durable.models.items()}, durable.next_model),
        records.members_record(
            membership,
            was_complete=durable.was_complete or membership.complete,
            vacant=max(durable.vacant, vacant),
            draining=durable.draining & {m.rank for m in membership.shards},
            needed_shards=durable.needed_shards,
        ),
        records.orders_record(max(durable.snapshot_id, known.snapshot_id)),
        records.revocations_record({**known.revoked, **durable.revoked}),
    ]


def _membership(durable: records.Durable, known: Knowledge) -> Membership:
    """Return a generation that no member has seen, with the members of both.

    If both have a member of the same rank, that in the shard server's membership counts.
    """
    theirs, ours = known.membership, durable.membership
    workers, replicas = numbered(_union(theirs.workers, ours.workers), theirs.grouping)
    step, version = _progress(durable, 0)
    others = (ModelProgress(model=n, step=m.step, version=m.version) for n, m in sorted(durable.models.items()) if n)
    return replace(
        theirs,
        generation=max(theirs.generation, ours.generation) + 1,
        workers=workers,
        shards=tuple(_union(theirs.shards, ours.shards)),
        num_replicas=replicas,
        step=step,
        version=version,
        models=tuple(others),
    )


def _progress(durable: records.Durable, number: int) -> tuple[int, int]:
    model = durable.models.get(number, records.DurableModel())
    return model.step, model.version


def _union(first: Iterable[Member], second: Iterable[Member]) -> list[Member]:
    """Return members by rank. The earlier of two with the same rank or incarnation counts."""
    found: dict[int, Member] = {}
    for member in (*first, *second):
        if member.incarnation not in {m.incarnation for m in found.values()}:
            found.setdefault(member.rank, member)
    return [found[rank] for rank in sorted(found)]


def _merged(ours: records.DurableModel, theirs: ModelKnowledge, shards: Iterable[Member]) -> records.DurableModel:
    state, epoch = theirs.state, ours.parameters.epoch
    is_newer = (state.epoch, state.version) >= (epoch, ours.version)
    decisions: list[Decision] = []
    for decision in sorted({d.step: d for d in (*ours.decisions, *theirs.decisions)}.values(), key=lambda d: d.step):
        decisions = records.retained(decisions, decision)
    return records.DurableModel(
        name=state.name or ours.name,
        step=max(theirs.step, ours.step),
        version=state.version if is_newer else ours.version,
        parameters=_parameters(ours.parameters, theirs, shards) if is_newer else ours.parameters,
        spec=state.spec,
        optimizer=state.optimizer if is_newer and state.optimizer is not None else ours.optimizer,
        decisions=tuple(decisions),
        committed=state.committed if is_newer else ours.committed,
    )


def _parameters(
    ours: records.ParameterState, theirs: ModelKnowledge, shards: Iterable[Member]
) -> records.ParameterState:
    """Return the holders of the parameters: all servers of the placement, if the model's values are complete.

    Changes that the older state has made without these servers do not count.
    """
    state = theirs.state
    assert state.placement is not None
    placement = state.placement
    if ours.placement is not None and ours.placement.number >= placement.number and ours.placement != placement:
        placement = replace(placement, number=ours.placement.number + 1)
    if state.epoch > ours.epoch:
        order = theirs.restore if theirs.restore is not None and theirs.restore.epoch == state.epoch else None
        replaced = ours.replaced or order is None or order.uri != FIRST_VALUES
        ours = records.ParameterState(epoch=state.epoch, restore=order, replaced=replaced, run_began=state.version)
    known = replace(ours, placement=placement, copied=max(ours.copied, state.copied))
    if not state.initialized:
        return known
    complete = {rank for h in placement.counts for rank in h.complete}
    holders = {m.rank: m.incarnation for m in shards if m.rank in complete}
    return replace(
        known, initialized=True, restore=None, failure="", corrupt={}, lost={}, holders=ours.holders | holders
    )


def _records_of(number: int, model: records.DurableModel) -> list[Record]:
    progress = ModelProgress(model=number, step=model.step, version=model.version)
    assert model.spec is not None
    return [
        records.spec_record(number, model.spec),
        *([] if model.optimizer is None else [records.optimizer_record(number, model.optimizer)]),
        records.progress_record(progress),
        records.committed_record(number, model.committed),
        records.parameters_record(number, model.parameters),
        *(records.decision_record(replace(d, model=number)) for d in model.decisions),
    ]
