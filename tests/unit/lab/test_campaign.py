"""Campaigns: what a file may hold, and that a seed decides all that follows from it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from axon_ps.errors import ConfigurationError
from axon_ps_lab.chaos.campaign import KINDS, Campaign, Embedded, Job, load, parse
from axon_ps_lab.chaos.plan import planned
from axon_ps_lab.faults.fault import Fault

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "examples" / "chaos.toml"
RECORD = ROOT / "benchmarks" / "results" / "chaos.json"

EVERY_KIND = "".join(f"[kinds.{name}]\nseconds = [0.2, 2.0]\n" for name in KINDS)


def campaign(text: str = EVERY_KIND, head: str = "") -> Campaign:
    return parse(f"{head}\n{text}", "c.toml")


def test_the_default_campaign_can_be_read() -> None:
    found = load(DEFAULT)
    assert found.faults == 2000
    assert found.embedded.shards > found.embedded.replication


def test_the_default_campaign_has_the_kinds_of_its_record() -> None:
    """Further kinds enter when a record is made again, since each changes all draws of the seed."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {row["kind"] for row in record["rows"]} <= {kind.value for kind in load(DEFAULT).kinds}


def test_every_kind_is_documented_with_its_roles_and_whether_it_lasts() -> None:
    page = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    documented = {name.strip("`"): (roles, "`seconds`" in values) for name, _, roles, values in rows}
    assert documented == {name: (", ".join(kind.traits.roles), kind.traits.lasts) for name, kind in KINDS.items()}
    outside = [f"`{name}`" for name, kind in KINDS.items() if kind.traits.from_outside]
    assert f"Only {', '.join(outside[:-1])} and {outside[-1]} are possible" in " ".join(page.split())


def test_values_of_a_file() -> None:
    found = campaign("[kinds.freeze]\nseconds = 2\nroles = ['worker']\n[embedded]\nshards = 4", "seed = 7\nquiet_s = 1")
    assert (found.seed, found.quiet_s, found.embedded.shards) == (7, 1.0, 4)
    assert found.kinds[Fault.FREEZE].seconds == (2.0,)
    assert found.kinds[Fault.FREEZE].roles == ("worker",)


def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    first = campaign(head="faults = 300")
    assert planned(first) == planned(first)
    assert planned(dataclasses.replace(first, seed=2)) != planned(first)


def test_fewer_faults_are_the_beginning_of_more() -> None:
    more = campaign("[kinds.kill]\n[kinds.reset]\n[embedded]\nspared_from = 1", "faults = 50")
    assert planned(dataclasses.replace(more, faults=20)) == planned(more)[:20]


def test_every_kind_strikes_every_role_that_it_can() -> None:
    found = Counter((fault.kind, fault.role) for fault in planned(campaign(head="faults = 2000")))
    assert set(found) == {(kind, role) for kind in KINDS.values() for role in kind.traits.roles}


def test_weights_are_how_often_beside_the_others() -> None:
    found = Counter(f.kind for f in planned(campaign("[kinds.kill]\nweight = 9\n[kinds.reset]", "faults = 1000")))
    assert 850 < found[Fault.KILL] < 950


def test_the_spared_live_through_the_second_half() -> None:
    half = [fault for fault in planned(campaign(head="faults = 2000")) if fault.number > 1000]
    killed = {(fault.role, fault.index) for fault in half if fault.kind is Fault.KILL}
    assert killed == {("shard", 1), ("shard", 2), ("worker", 1)}
    assert not [fault for fault in half if fault.kind.traits.ends_coordinator]
    long = [f for f in half if f.kind.traits.silences and f.seconds > 1.0]
    assert ("worker", 0) not in {place for f in long for place in ((f.role, f.index), *f.side)}


def test_the_smaller_side_of_a_partition_has_no_two_copies() -> None:
    sides = [fault.side for fault in planned(campaign("[kinds.partition]", "faults = 500"))]
    assert max(sum(role == "shard" for role, _ in side) for side in sides) == 1
    assert max(len(side) for side in sides) > 1


def test_a_cut_is_between_a_member_and_another_shard_server() -> None:
    for fault in planned(campaign("[kinds.cut]", "faults = 500")):
        ((role, index),) = fault.side
        assert role == "shard"
        assert (role, index) != (fault.role, fault.index)


def test_what_a_fault_is_called() -> None:
    fault = planned(campaign("[kinds.slow_link]\nseconds = 2\nroles = ['shard']", "moments = 0"))[0]
    assert fault.name == f"slow link of 1 MB/s of shard {fault.index} for 2 s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = ", "is no TOML"),
        ("", r"names no kind of fault; give at least one table, such as \[kinds.kill\]"),
        ("[kinds.meteor]", "there is no kind 'meteor'; use one of kill, freeze"),
        ("[kinds.kill]\nheat = 3", "there is no 'heat'; use of weight, roles, seconds"),
        ("heat = 3\n[kinds.kill]", "there is no 'heat'; use of seed, faults"),
        ("seed = 'one'\n[kinds.kill]", "seed = 'one' was given; it must be a number without a fraction"),
        ("faults = true\n[kinds.kill]", "must be a number without a fraction"),
        ("faults = 0\n[kinds.kill]", "faults = 0 was given; it must be at least 1"),
        ("moments = 2\n[kinds.kill]", "moments = 2 was given; it is a part, from 0 to 1"),
        ("[kinds.kill]\nroles = ['boss']", "roles has 'boss', which it cannot strike; use of coordinator, shard"),
        ("[kinds.bit_flip]\nroles = ['worker']", "roles has 'worker', which it cannot strike; use of shard"),
        ("[kinds.freeze]\nseconds = 0", "seconds must be above 0 and at most 60"),
        ("[kinds.freeze]\nseconds = 'long'", "must be a number or a list of numbers"),
        ("[kinds.kill]\nweight = 0", "every kind has the weight 0"),
        ("[kinds.kill]\nweight = -1", "weight = -1 was given; it must be at least 0"),
        ("kinds = 3", "names no kind of fault"),
        ("[kinds]\nkill = 3", "3 was given; it must be a table"),
        ("[kinds.kill]\n[embedded]\n[job]", "strikes one of them: remove the other table"),
        ("[kinds.kill]\n[embedded]\nreplication = 1", "the death of a server loses values otherwise"),
        ("[kinds.kill]\n[embedded]\nsamples = 100\nbatch = 16", "samples = 100 is no multiple of batch = 16"),
        ("[kinds.kill]\n[embedded]\nbatch = 1", "less than a sample for each of 2 workers"),
        ("[kinds.reset]\n[kinds.delay]\n[job]", "reset, delay cannot be had in a running job"),
        ("[kinds.truncated_file]\n[job]", "truncated_file needs the job's checkpoints; give checkpoint_dir"),
        ("[kinds.kill]\n[job]", r"give pid_files.worker in \[job\], or leave the role out"),
        ("[kinds.kill]\n[job.pid_files]\nboss = ['a']", "there is no role 'boss'"),
        ("[kinds.kill]\n[job]\npid_files = 3", "must be a table with a list of files for each role"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse(text, "c.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_a_running_job() -> None:
    text = "[kinds.kill]\nroles = ['shard', 'worker']\n[job]\ncoordinator = 'a:1'\n[job.pid_files]\nworker = ['w.pid']"
    found = campaign(text)
    assert found.target == Job(coordinator="a:1", pid_files={"worker": ("w.pid",)})
    assert all(not fault.moment for fault in planned(found))
    with pytest.raises(ConfigurationError, match="strikes a running job"):
        _ = found.embedded


def test_a_job_of_one_worker_has_its_coordinator_struck_too() -> None:
    one = dataclasses.replace(campaign("[kinds.kill]\nroles = ['coordinator', 'worker']"), target=Embedded(workers=1))
    assert {(fault.role, fault.index) for fault in planned(one)} == {("coordinator", 0), ("worker", 0)}
