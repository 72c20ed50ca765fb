"""The table of metrics describes every statistic there is, in names that Prometheus's own parser takes."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from axon_ps.aggregation.client.client import COUNTERS as COLLECTIVE_COUNTERS
from axon_ps.aggregation.core.engine import CollectiveEngine
from axon_ps.collectives.staging import Staging
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.observe.metrics.exposition import Exposition
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.observe.metrics.sources import Source, register, registered
from axon_ps.observe.metrics.table import HISTOGRAMS, REPEATED, TABLE, described
from axon_ps.reduction.call import Operation
from axon_ps.shard.client.transfers import COUNTERS as TRANSFERS
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.sharding.policy import Policy
from axon_ps.worker.steps.stepping import AsynchronousSteps
from axon_ps.worker.world import World


def coordinator() -> Mapping[str, float]:
    state = CoordinatorState(CoordinatorConfig(job="j", world_size=1, num_shards=1), 0.0, {}, new_id="id")
    return state.statistics(state.status(0.0), 0.0)


def worker() -> Mapping[str, float]:
    with World.mock() as world:
        return world.statistics()


REAL = {
    "coordinator": coordinator,
    "worker": worker,
    "shard": lambda: ShardEngine().statistics() | CollectiveEngine().statistics(),
    "group": lambda: Staging().statistics() | dict.fromkeys(COLLECTIVE_COUNTERS, 0.0),
}


@pytest.mark.parametrize("source", sorted(REAL))
def test_every_statistic_is_described(source: str) -> None:
    missing = [name for name in REAL[source]() if described(source, name) is None]
    assert not missing, f"give these rows in observe/metrics/table.py, under {source!r}"


def test_so_are_those_that_are_not_always_there() -> None:
    names = [*TRANSFERS, *AsynchronousSteps(Policy()).statistics()]
    names += [f"{operation.value}_{what}" for operation in Operation for what in ("calls", "s")]
    assert not [name for name in names if name not in TABLE["worker"]]


def test_names_are_unique_and_units_are_at_their_end() -> None:
    rows = [metric for rows in TABLE.values() for metric in rows.values()]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for source, described_ in TABLE.items():
        for statistic, metric in described_.items():
            unit = (
                "_per_second"
                if statistic.endswith("_per_s")
                else "_seconds"
                if statistic.endswith("_s")
                else "_bytes"
                if "bytes" in statistic
                else ""
            )
            assert metric.name.endswith(unit), f"{source} {statistic}"
            assert not metric.name.endswith("_total")


def text(*sources: Source) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, _ = Exposition(lambda: sources, {"rank": "0"}).encode("application/openmetrics-text")
    families = text_string_to_metric_families(body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_what_is_exported_is_what_statistics_returns() -> None:
    found = text(Source(kind="worker", read=lambda: {"bytes_out": 7.0, "residual_bytes": 3.0}))
    assert found["axon_ps_worker_sent_bytes_total", (("rank", "0"),)] == 7.0
    assert found["axon_ps_worker_residual_bytes", (("rank", "0"),)] == 3.0


def test_models_and_members_are_labels() -> None:
    found = text(
        Source(kind="shard", read=lambda: {"master_bytes": 9.0, "model/a/b/master_bytes": 4.0}),
        Source(kind="coordinator", read=lambda: {"worker/3/silent_s": 0.5}),
    )
    assert found["axon_ps_shard_master_bytes", (("rank", "0"),)] == 9.0
    assert found["axon_ps_model_shard_master_bytes", (("model", "a/b"), ("rank", "0"))] == 4.0
    member = (("member", "worker"), ("member_rank", "3"), ("rank", "0"))
    assert found["axon_ps_member_silence_seconds", member] == 0.5


def test_sources_with_the_same_labels_are_added_up_and_the_rest_is_not_lost() -> None:
    ddp = Source(kind="ddp", read=lambda: {"rounds": 2.0, "new": 5.0, f"{REPEATED}x": 1.0})
    found = text(ddp, ddp)
    assert found["axon_ps_ddp_reductions_total", (("rank", "0"),)] == 4.0
    labels = (("rank", "0"), ("source", "ddp"), ("statistic", "new"))
    assert found["axon_ps_undescribed", labels] == 10.0


def test_a_histogram_is_read_by_their_parser() -> None:
    histogram = Histogram()
    histogram.observe(0.3)
    found = text(Source(kind="worker", read=dict, histograms=lambda: {"vote": histogram}))
    name = "axon_ps_worker_vote_seconds"
    assert (found[f"{name}_count", (("rank", "0"),)], found[f"{name}_sum", (("rank", "0"),)]) == (1.0, 0.3)
    assert found[f"{name}_bucket", (("le", "0.25"), ("rank", "0"))] == 0.0
    assert found[f"{name}_bucket", (("le", "0.5"), ("rank", "0"))] == 1.0


def test_every_histogram_is_described() -> None:
    with World.mock() as world:
        assert world.models.histograms().keys() == HISTOGRAMS["worker"].keys()


def test_what_is_freed_is_seen_no_more() -> None:
    class Wrapper:
        def statistics(self) -> dict[str, float]:
            return {"rounds": 1.0}

    wrapper = Wrapper()
    register("ddp", wrapper, model="of this test")
    mine = [s for s in registered() if s.labels.get("model") == "of this test"]
    assert [dict(s.read()) for s in mine] == [{"rounds": 1.0}]
    del wrapper, mine
    gc.collect()
    assert not [s for s in registered() if s.labels.get("model") == "of this test"]
