"""A hundred of `make lab NAME=programs`, the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from program import STRATEGIES, Program
from programs_run import Campaign, shown, workers
from shared_workers import SharedWorkers


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedWorkers]:
    """Workers for all of them."""
    with workers() as made:
        yield made


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_ends_with_torchs_values_or_is_refused_in_time(shared: SharedWorkers, strategy: str) -> None:
    campaign = Campaign(shared, programs=25, seed=0, strategies=(strategy,))
    campaign.run()
    found = [shown(number, finding) for number, finding in enumerate(campaign.findings, 1)]
    assert not found, (
        "run one by `make lab NAME=programs ARGS='--replay FILE'`, its second line in FILE:\n" + "\n".join(found)
    )


def test_a_program_is_what_its_json_says() -> None:
    texts = set[str]()
    for text in (
        "{}",
        '{"strategy": "NO_SHARD", "net": {"blocks": [{"kind": "tanh"}, {}], "calls": [1, 0]}, "loop": [{"micro": 2}]}',
    ):
        assert Program.from_json(text).to_json() == text
        texts.add(text)
    assert len(texts) == 2
