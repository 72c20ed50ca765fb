"""Knowledge of the job that shard servers have, and a state that is older than that. Pure.

Note: [An older state]
    A coordinator may come back with a state from before: a copy that somebody has restored, or a journal that has lost
    its end. Everything that it had announced since is known to its members. So whoever comes back says how far its
    knowledge goes (`Position`). If that is further than the state, a worker waits for a shard server, and a shard
    server is asked for what it knows (`Knowledge`) before it is let in. That is written (`learned`), and the job goes
    on from it, in a generation that no member has seen: what was under way is aborted, what was committed is not lost.

    Only shard servers are believed: they hold the parameters, which the facts are about. What no member knows is lost:
    values of the key-value store, and that a server was being drained.
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
"""A generation that is so far beyond ours is nobody's."""


@dataclass(frozen=True, kw_only=True)
class ModelKnowledge:
    """A shard server's knowledge of a model.

    Attributes:
        state: with layout and optimizer, at the version of now.
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
        released: the numbers of those that were.
        snapshot_id: of the newest order of a checkpoint.
        revoked: what is revoked, and why.
    """

    membership: Membership
    models: tuple[ModelKnowledge, ...] = ()
    released: frozenset[int] = frozenset()
    snapshot_id: int = 0
    revoked: Mapping[str, str]


def behind(ours: Position, theirs: Position) -> str:
    """Say what a process knows that a state does not have; "" = nothing."""
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
            if model.initialized and not known.initialized:
                return f"all values of model {model.model}, and the state ends before that they were there"
    if gone := theirs.released - ours.released:
        return f"that model {min(gone)} was released"
    if theirs.snapshot_id > ours.snapshot_id:
        return f"checkpoint order {theirs.snapshot_id}, and the state ends with {ours.snapshot_id}"
    return ""


def check_known(known: Knowledge, state_id: str, generation: int) -> None:
    """Check that it can be knowledge of the job with a state of this id, which ends with this generation.

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
    """The records by which a state gets what a shard server knows; see Note: [An older state].

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
    """A generation that no member has seen, with the members of both; of a rank the one that the shard server knows."""
    theirs, ours = known.membership, durable.membership
    workers, replicas = numbered(_union(theirs.workers, ours.workers), theirs.by_node)
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
    """Members by rank, those that come first before others of the same rank or incarnation."""
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
    """The holders of the parameters. Of a model whose values are complete, whoever is to hold some does.

    What the state has changed since it is older, without those who know, does not count.
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
