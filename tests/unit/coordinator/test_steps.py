"""Votes and sums in, one decision out. Tests of `coordinator/core/steps/stepping.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from axon_ps.coordinator.core.actions import Persist, SendEvent
from axon_ps.coordinator.core.steps.decision import Tally
from axon_ps.coordinator.messages import ready_from_proto
from axon_ps.errors import InvalidRequest
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import Decision, DType, Membership, OptimizerChange, OptimizerSpec, Outcome
from axon_ps.wire.events import Ready, Vote
from axon_ps.wire.v1 import session_pb2
from coordinator_driver import OPTIMIZER, Driver, Peer

FULL = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": 0.0,
    "maximize": 0.0,
}


def decided(peer: Peer) -> Decision:
    return peer.last(Decision)


def step(workers: list[Peer], shards: list[Peer], sums: Any = (4.0,), **vote: Any) -> Decision:
    for shard, total in zip(shards, sums, strict=True):
        shard.ready(total)
    for w in workers:
        w.vote(**vote)
    return decided(workers[0])


def test_a_step_commits_when_all_have_reported() -> None:
    d = Driver()
    workers, shards = d.assembled()
    generation = workers[0].membership.generation
    workers[0].vote(max_norm=1.0, hyper=({"lr": 0.2},))
    shards[0].ready(4.0)
    assert not workers[0].received(Decision)
    workers[1].vote(max_norm=1.0, hyper=({"lr": 0.2},))
    expected = Decision(
        step=1,
        generation=generation,
        outcome=Outcome.COMMIT,
        version=1,
        grad_norm=2.0,
        clip_factor=pytest.approx(0.5, rel=1e-6),  # type: ignore[arg-type]
        hyper=({**FULL, "lr": 0.2},),
    )
    for p in (*workers, *shards):
        assert decided(p) == expected
    status = d.state.status()
    assert (status.version, status.step) == (1, 2)
    assert (status.counters["steps_committed"], status.counters["last_grad_norm"]) == (1, 2.0)


def test_the_norm_of_the_newest_step_is_known_after_a_restart() -> None:
    d = Driver()
    workers, shards = d.assembled()
    for sum_of_squares in (4.0, 9.0):
        step(workers, shards, (sum_of_squares,), max_norm=1.0)
    before = d.state.status().counters["last_grad_norm"]
    d.restart()
    assert before == d.state.status().counters["last_grad_norm"] == 3.0


def test_the_decision_is_written_before_it_is_pushed() -> None:
    d = Driver()
    workers, shards = d.assembled()
    d.performed.clear()
    step(workers, shards)
    persist, *pushes = d.performed
    assert isinstance(persist, Persist)
    assert {r.key for r in persist.records} == {"decision/1", "progress"}
    assert all(isinstance(p, SendEvent) and isinstance(p.event, Decision) for p in pushes)
    assert sum(len(p.sessions) for p in pushes if isinstance(p, SendEvent)) == 3


def test_the_norm_is_over_all_servers_and_unclipped_without_max_norm() -> None:
    d = Driver(num_shards=2)
    workers, shards = d.assembled(shards=2)
    decision = step(workers, shards, sums=(9.0, 16.0))
    assert (decision.grad_norm, decision.clip_factor) == (5.0, 1.0)


def test_weighted_gradients_are_divided_by_the_sum_of_the_weights() -> None:
    d = Driver()
    workers, shards = d.assembled()
    shards[0].ready(36.0)
    workers[0].vote(weight=2.5, max_norm=1.0)
    workers[1].vote(weight=0.5, max_norm=1.0)
    decision = decided(workers[0])
    assert (decision.grad_norm, decision.weight) == (2.0, 3.0)  # of the mean
    assert decision.clip_factor == pytest.approx(0.5 / 3.0, rel=1e-6)


def test_a_step_of_which_nobody_has_anything_is_skipped() -> None:
    d = Driver()
    workers, shards = d.assembled()
    decision = step(workers, shards, sums=(0.0,), weight=0.0)
    assert (decision.outcome, decision.version) == (Outcome.SKIP, 0)
    assert decision.reason == "every worker's weight in the step is 0"


def test_a_server_without_trainable_slices_is_not_waited_for() -> None:
    d = Driver(num_shards=2, replication=1)
    shards = [d.shard(), d.shard()]
    workers = [d.worker(), d.worker()]
    spec = JobSpec(layout=Layout(units=(build_unit("small", [("w", (8,), DType.F32)]),)))
    for w in workers:
        d.register(w, spec, OptimizerSpec(name="sgd", groups=({"lr": 1.0},), group_of=(0,)))
    for s in shards:
        s.initialized()
    assert step(workers, shards[:1]).outcome is Outcome.COMMIT


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_skip_the_step(bad: float) -> None:
    d = Driver(num_shards=2)
    workers, shards = d.assembled(shards=2)
    decision = step(workers, shards, sums=(1.0, bad), max_norm=1.0)
    assert (decision.outcome, decision.version, decision.step) == (Outcome.SKIP, 0, 1)
    assert not math.isfinite(decision.grad_norm)
    assert decision.reason == "the gradients are not finite (seen at shard server 1)"
    assert step(workers, shards, sums=(1.0, 3.0)).version == 1


def test_finite_sums_whose_sum_is_not_skip_the_step() -> None:
    d = Driver(num_shards=2)
    workers, shards = d.assembled(shards=2)
    assert step(workers, shards, sums=(1.7e308, 1.7e308)).outcome is Outcome.SKIP


@pytest.mark.parametrize(
    ("votes", "reason"),
    [
        (
            [{"max_norm": 1.0}, {"max_norm": 2.0}],
            "the votes disagree on max_norm: rank 0: 1.0; rank 1: 2.0; every worker must step with the same values",
        ),
        ([{"hyper": ({"lr": 0.1},)}, {"hyper": ({"lr": 0.2},)}], "disagree on lr of group 0: rank 0: 0.1; rank 1: 0.2"),
        ([{"hyper": ({"lr": 0.1},)}, {}], "disagree on the number of parameter groups: rank 0: 1; rank 1: 0"),
        ([{"hyper": ({"lr": 0.1},)}, {"hyper": ({"eps": 0.1},)}], "disagree on eps of group 0: rank 0: 'absent'"),
        ([{"hyper": ({}, {})}] * 2, "the votes have 2 parameter groups; the registered optimizer has 1"),
        ([{"hyper": ({"lr": math.nan},)}] * 2, "the votes' hyperparameters of group 0 cannot be: .*lr"),
        ([{"hyper": ({"momentum": 1.0},)}] * 2, "adamw has no hyperparameter 'momentum'"),
        (
            [{"optimizer": OptimizerChange(spec=OPTIMIZER)}, {}],
            "on the optimizer: rank 0: another adamw .*; rank 1: as",
        ),
        ([{"max_norm": -1.0}] * 2, "max_norm is -1.0"),
        ([{"weight": 1.0}, {}], "disagree on whether gradients are weighted: rank 0: yes; rank 1: no"),
        ([{"max_norm": math.nan}] * 2, "max_norm is nan"),
    ],
)
def test_votes_that_disagree_or_cannot_be_abort_the_step(votes: list[dict[str, Any]], reason: str) -> None:
    d = Driver()
    workers, shards = d.assembled()
    shards[0].ready()
    for w, vote in zip(workers, votes, strict=True):
        w.vote(**vote)
    decision = decided(workers[1])
    assert (decision.outcome, decision.version) == (Outcome.ABORT, 0)
    assert re.search(reason, decision.reason), decision.reason
    assert len(workers[1].received(Membership)) == len({m.generation for m in workers[1].received(Membership)})
    assert step(workers, shards).outcome is Outcome.COMMIT


def test_aborts_because_of_votes_are_counted_until_a_step_ends_otherwise() -> None:
    d = Driver()
    workers, shards = d.assembled()
    counted = []
    for rates in ((0.1, 0.2), (0.3, 0.2), (0.1, 0.1), (0.2, 0.1)):
        shards[0].ready()
        for w, lr in zip(workers, rates, strict=True):
            w.vote(hyper=({"lr": lr},))
        counted.append(decided(workers[0]).refused)
    assert counted == [1, 2, 0, 1]


def test_hyperparameters_may_need_moments_later_and_a_checkpoint_has_those_of_its_version() -> None:
    d = Driver()
    workers, shards = d.assembled()
    for amsgrad, lr in ((0.0, 0.1), (1.0, 0.2), (0.0, 0.3)):
        assert step(workers, shards, hyper=({"amsgrad": amsgrad, "lr": lr},)).outcome is Outcome.COMMIT
    model = next(iter(d.state.models))
    saved = model.optimizer
    assert saved is not None
    assert saved.groups == ({**FULL, "lr": 0.3},)
    names = create("adamw").state_names
    assert names(saved.groups) == ("exp_avg", "exp_avg_sq")
    assert names((*saved.groups, *saved.moments)) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    joiner = d.worker()
    assert not d.register(joiner).first  # with the optimizer as it was registered at first


@pytest.mark.parametrize("keeps", [False, True])
def test_another_optimizer_takes_the_place_with_a_step(keeps: bool) -> None:
    d = Driver()
    workers, shards = d.assembled()
    other = OptimizerSpec(name="sgd", groups=({"lr": 0.1, "momentum": 0.9},), group_of=OPTIMIZER.group_of)
    change = OptimizerChange(spec=other, retains_moments=keeps)
    decision = step(workers, shards, hyper=({"lr": 0.5, "momentum": 0.9},), optimizer=change)
    assert decision.outcome is Outcome.COMMIT
    assert decision.optimizer == change
    assert decision.hyper[0]["momentum"] == 0.9
    later = step(workers, shards, hyper=({"lr": 0.4, "momentum": 0.9},))
    assert (later.outcome, later.optimizer) == (Outcome.COMMIT, None)
    model = next(iter(d.state.models))
    assert model.registration.optimizer == other


def test_an_optimizer_that_differs_in_values_only_stays_as_registered() -> None:
    d = Driver()
    workers, shards = d.assembled()
    change = OptimizerChange(spec=dataclasses.replace(OPTIMIZER, groups=({**FULL, "lr": 0.7},)))
    assert step(workers, shards, hyper=({**FULL, "lr": 0.7},), optimizer=change).optimizer is not None
    assert not d.register(d.worker()).first


def test_what_is_not_of_the_current_attempt_is_ignored() -> None:
    d = Driver()
    workers, shards = d.assembled()
    generation = workers[0].membership.generation
    for stale in ({"step": 0}, {"step": 2}, {"generation": generation - 1}, {"generation": generation + 1}):
        shards[0].ready(**stale)
        for w in workers:
            w.vote(**stale)
    assert d.state.status().pending == ()


def test_the_first_message_counts_and_repeating_it_is_harmless() -> None:
    d = Driver()
    workers, shards = d.assembled()
    shards[0].ready(4.0)
    shards[0].ready(9.0)
    workers[0].vote(max_norm=1.0)
    workers[0].vote(max_norm=2.0)
    workers[1].vote(max_norm=1.0)
    workers[1].vote(max_norm=1.0)
    assert decided(workers[0]).grad_norm == 2.0
    assert len(workers[0].received(Decision)) == 1


def test_only_workers_vote_and_only_shard_servers_are_ready() -> None:
    d = Driver()
    workers, shards = d.assembled()
    with pytest.raises(InvalidRequest, match=r"shard server 0 \(node s\) votes; only a worker may"):
        shards[0].vote()
    with pytest.raises(InvalidRequest, match="only a shard may"):
        workers[0].ready()
    with pytest.raises(InvalidRequest, match="a sum of squares is -1.0; it is 0 or more"):
        ready_from_proto(session_pb2.Ready(generation=1, step=1, sums_of_squares=[-1.0]))


def test_nothing_is_decided_while_members_are_missing() -> None:
    d = Driver(world_size=2)
    w, s = d.worker(), d.shard()
    d.register(w)
    s.initialized()
    s.ready()
    w.vote()
    assert not w.received(Decision)


def test_after_a_commit_a_death_changes_nothing() -> None:
    d = Driver()
    workers, shards = d.assembled()
    step(workers, shards)
    workers[0].lose()
    assert [x.outcome for x in workers[1].received(Decision)] == [Outcome.COMMIT, Outcome.ABORT]
    assert workers[1].membership.version == 1


def test_a_member_gets_missed_decisions_before_the_membership() -> None:
    d = Driver()
    workers, shards = d.assembled()
    shards[0].ready()
    workers[0].vote()
    workers[1].vote()
    committed = decided(workers[0])
    shards[0].lose()
    inbox = shards[0].inbox
    inbox.clear()
    shards[0].join()
    kinds = ["Welcome", "JobState", "Decision", "Decision", "JobState", "Membership"]
    assert [type(e).__name__ for e in inbox] == kinds
    assert inbox[1].optimizer is not None, "it may have missed the registration, and could not apply the step"
    assert inbox[1].placement is None, "slices change after the decisions"
    assert inbox[2] == committed
    assert inbox[3].outcome is Outcome.ABORT
    assert (inbox[5].version, inbox[5].step) == (1, 3)


def test_decisions_survive_a_restart() -> None:
    d = Driver()
    workers, shards = d.assembled()
    last = step(workers, shards, sums=(math.inf,))
    last = step(workers, shards, max_norm=1.0)
    d.restart()
    workers[0].inbox.clear()
    for peer in (workers[0], *shards):
        peer.join()
    assert decided(workers[0]) == last
    assert math.isinf(workers[0].received(Decision)[0].grad_norm)
    assert (d.state.status().version, d.state.status().step) == (1, 3)
    for p in (workers[1], *shards):
        p.join()
    assert step(workers, shards).version == 2


def test_a_vote_given_before_a_restart_is_given_again_after_it() -> None:
    d = Driver()
    workers, shards = d.assembled()
    workers[0].vote()
    d.restart()
    for p in (*workers, *shards):
        p.join()
    shards[0].ready()
    workers[1].vote()
    assert d.state.status().pending == ("votes of worker 0",)
    workers[0].vote()
    assert decided(workers[0]).outcome is Outcome.COMMIT


def test_only_the_newest_decisions_are_retained() -> None:
    d = Driver()
    workers, shards = d.assembled()
    for _ in range(40):
        step(workers, shards)
    assert len([k for k in d.store.load() if k.startswith("decision/")]) == 16
    workers[0].inbox.clear()
    workers[0].join()
    assert [x.step for x in workers[0].received(Decision)] == list(range(25, 41))


def test_a_tally_names_at_most_eight_ranks() -> None:
    tally = Tally()
    tally.vote(0, Vote(generation=1, step=1))
    tally.ready(0, Ready(generation=1, step=1, sums_of_squares=(0.0,)))
    assert tally.pending(range(12), [0]) == ["votes of worker 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"]


def test_hyperparameters_left_out_are_the_registered_ones() -> None:
    d = Driver()
    workers, shards = d.assembled()
    assert step(workers, shards).hyper == ({**FULL, **OPTIMIZER.groups[0]},)


# ---------------------------------------------------------------------- parameters without a gradient, withdrawals


def test_a_commit_names_the_parameters_that_no_worker_has_a_gradient_of() -> None:
    d = Driver()
    workers, shards = d.assembled()
    shards[0].ready(4.0)
    workers[0].vote(untouched=(0, 7))
    workers[1].vote(untouched=(7,))  # there is no parameter 7: nobody leaves it alone
    assert decided(workers[0]).outcome is Outcome.COMMIT
    assert decided(workers[0]).untouched == ()


def test_a_step_without_any_gradient_is_skipped_and_what_it_commits_is_committed() -> None:
    d = Driver()
    workers, shards = d.assembled()
    everything = tuple(range(len(OPTIMIZER.group_of)))
    decision = step(workers, shards, untouched=everything, commit={"position": "3"})
    assert (decision.outcome, decision.version) == (Outcome.SKIP, 0)
    assert "no worker has a gradient" in decision.reason
    assert decision.commit == {"position": "3"}
    assert step(workers, shards).outcome is Outcome.COMMIT


def test_a_withdrawal_aborts_the_step_once_all_have_voted_and_names_the_worker() -> None:
    d = Driver()
    workers, shards = d.assembled()
    workers[1].vote(withdrawn=True)
    assert not workers[0].received(Decision)
    workers[0].vote()
    assert decided(workers[0]).outcome is Outcome.ABORT
    assert "worker 1 withdrew" in decided(workers[0]).reason
    assert decided(workers[0]).next_generation == 0
    assert step(workers, shards).outcome is Outcome.COMMIT
