"""docs/from_rust_names.md: our names in it exist, and each difference that it tells has a test that shows it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_features import resolve, said_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from_rust_names.md").read_text()

MOCK_TRAINING = "unit/parallel/test_mock_training.py"
MOCK_WORLD = "unit/worker/test_mock_world.py"
FIRST_TRIES = "unit/parallel/test_first_tries.py"
ON_PARAMETERS = "unit/parallel/test_torch_functions_on_parameters.py"
STRATEGIES = "unit/parallel/test_fsdp_strategies_faked.py"

TESTED = {
    "arrays are the crate's tensors": (
        "unit/collectives/test_arrays.py",
        "test_results_go_to_memory_that_dlpack_gives",
    ),
    "`all_reduce_sum(&local)`": (
        "unit/collectives/test_process_group.py",
        "test_functions_change_what_they_are_given_and_a_copy_keeps_it",
    ),
    "`scatter_tensor(&t, src)`": (
        "unit/collectives/test_process_group.py",
        "test_scatter_takes_data_on_every_rank_and_uses_the_roots",
    ),
    "`World::mock()` and": (MOCK_TRAINING, "test_every_strategy_on_two_threads_equals_one_process"),
    "`recv(0, &pg)`": (MOCK_WORLD, "test_what_is_received_without_a_place_for_it_is_returned"),
    "FSDP on a sub-group": (MOCK_TRAINING, "test_servers_train_for_the_whole_world_only"),
    "ZeRO by number": (MOCK_TRAINING, "test_zero_by_number_is_a_strategy"),
    "`DDP::new(model, world)`": (FIRST_TRIES, "test_a_world_stands_for_its_workers"),
    "`GradientSynchronizer::prepare(10)`": (FIRST_TRIES, "test_what_was_given_and_what_is_needed_is_said"),
    "`ColumnParallelLinear::new": (FIRST_TRIES, "test_what_was_given_and_what_is_needed_is_said"),
    "`Pipeline::from_modules": (FIRST_TRIES, "test_what_was_given_and_what_is_needed_is_said"),
    "`pipeline.forward(input)`": (
        FIRST_TRIES,
        "test_a_pipeline_that_was_called_for_inference_has_no_graph_and_torch_says_so",
    ),
    "`mixed_precision(true)`": (FIRST_TRIES, "test_short_forms_of_mixed_precision"),
    "parameters are there right after wrapping": (
        ON_PARAMETERS,
        "test_values_are_read_while_a_unit_runs_and_inside_summon_and_nowhere_else",
    ),
    "`param.grad` after a backward": (ON_PARAMETERS, "test_a_gradient_that_was_sent_is_there_and_has_no_values"),
    "`sync_gradients()` must be called": (STRATEGIES, "test_gradients_are_synced_by_hand"),
    "`clip_grad_norm(max_norm)`": (
        ON_PARAMETERS,
        "test_torchs_clipping_clips_all_of_them_and_its_norm_is_known_after_the_step",
    ),
    "`Adam::new(model.parameters())`": (ON_PARAMETERS, "test_torchs_optimizers_are_refused_at_their_first_step"),
    "a second `backward`": (
        "unit/parallel/test_fsdp_hooks.py",
        "test_the_gradients_of_several_backwards_are_added_up",
    ),
    "`update_shards(flat)`": (STRATEGIES, "test_values_are_replaced"),
    "`FSDPMemoryStats { .. }`": (FIRST_TRIES, "test_memory_stats_by_hand"),
    "`memory_savings`": (STRATEGIES, "test_accessors_and_estimates"),
    "`SyncBatchNorm2d`": ("unit/parallel/test_sync_batch_norm.py", "test_equals_one_process_with_the_whole_batch"),
    "`DTensor::redistribute`": ("unit/parallel/test_redistribute.py", "test_every_way_to_every_other"),
    "`send` and `recv` of two ranks": ("unit/collectives/test_p2p.py", "test_a_ring_and_exchanges_of_two"),
    "`Backend::Mock`": ("contract/test_conformance_threads.py", "test_mock"),
    "errors of one rank": (
        "unit/collectives/test_objects.py",
        "test_a_rank_that_cannot_send_its_value_reports_that_to_the_others",
    ),
    "`MASTER_ADDR` and": ("unit/worker/test_bootstrap.py", "test_the_store_is_torchs_where_there_is_one"),
    "`torchrun`, `mpirun`": (
        "e2e/test_launched_workers.py",
        "test_workers_of_mpirun_form_a_job_which_lives_until_the_last_of_them_is_done",
    ),
    "NCCL joins all ranks": (
        "unit/collectives/test_selection.py",
        "test_device_memory_goes_over_nccl_inside_a_node_only",
    ),
    "HybridShard keeps": (
        "integration/test_nccl_nodes.py",
        "test_every_wrapper_comes_to_the_same_over_nccl_as_over_shared_memory",
    ),
    "every wrapper stands alone": (
        "integration/test_several_models.py",
        "test_five_models_in_turns_equal_torch_through_checkpoints_at_any_world_size",
    ),
    "workers run functions of files": (
        "integration/test_local_cluster.py",
        "test_functions_in_no_file_travel_by_value",
    ),
}
"""The beginning of a row of "Differences" -> the file and name of a test that shows what it says."""


def section(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def ours() -> list[str]:
    return list(dict.fromkeys(re.findall(r"`(axon_ps(?:\.\w+)+)`", PAGE)))


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("name", ours())
def test_what_the_page_names_is_there(name: str) -> None:
    found, holder = resolve(name)
    plain = isinstance(found, (float, ModuleType))
    assert plain or said_of(found, holder, name.rpartition(".")[2]), f"{name} has no docstring"


def test_every_row_of_the_names_has_one_of_ours() -> None:
    assert [row for row in section("Names") if len(row) != 2 or "`axon_ps." not in row[1]] == []


def test_every_difference_is_tested() -> None:
    begins = [next((b for b in TESTED if row[0].startswith(b)), None) for row in section("Differences")]
    assert None not in begins, section("Differences")[begins.index(None)]
    assert sorted(map(str, begins)) == sorted(TESTED)
    for begin, (file, name) in TESTED.items():
        assert name in functions_of(file), f"{begin}: there is no {name} in {file}"
