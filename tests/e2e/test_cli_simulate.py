"""`axon-ps simulate`: the file of the documentation, as text, JSON and a picture; and what is answered to mistakes."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from axon_ps.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """The file that docs/simulate.md shows."""
    found = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "gpt.toml"
    path.write_text(found[1], encoding="utf-8")
    return path


def test_the_documented_file_tells_what_a_cluster_would_do(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario)]) == 0
    out = capsys.readouterr().out
    for line in ("a step", "memory of a shard server", "goodput", "tokens/s", "an hour", "20,000 steps", "bottleneck"):
        assert line in out


def test_numbers_of_servers_are_compared(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "servers.svg"
    assert main(["simulate", str(scenario), "--servers", "8,2,4", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("→") == 1, "one is to be rented"
    texts = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"2", "4", "8", "price of a million tokens"} <= set(texts)
    assert main(["simulate", str(scenario), "--servers", "2,4,8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["servers"] for each in found] == [2, 4, 8]
    assert [each["best"] for each in found].count(True) == 1
    cheapest = min(found, key=lambda each: each["per_million_tokens"])
    assert cheapest["best"]
    assert cheapest["cost"] == pytest.approx(cheapest["hours"] * cheapest["per_hour"])


def test_a_job_that_comes_to_no_end_has_no_price(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = scenario.read_text().replace("worker_mtbf_h = 12 ", "worker_mtbf_h = 0.001 ").replace("min_workers = 4", "")
    scenario.write_text(text)
    picture = tmp_path / "servers.svg"
    assert main(["simulate", str(scenario), "--servers", "4,8", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [each["per_million_tokens"] for each in found] == [None, None]
    assert "nan" not in picture.read_text()
    assert "inf" not in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.toml"], "cannot be read"),
        (["gpt.toml", "--servers", "2,many"], "give numbers with commas"),
        (["gpt.toml", "--servers", "0,2"], "there is at least 1"),
        (["gpt.toml", "--servers", "1,2"], "job.replication is 2 with 1 servers"),
        (["gpt.toml", "--plot", "x.svg"], "give some with --servers"),
        (["gpt.toml", "--profile", "none.json"], "`axon-ps doctor --measure"),
        (["gpt.toml", "--servers", "2,4", "--plot", "no/such/x.svg"], "No such file"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    scenario: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(scenario.parent)
    assert main(["simulate", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_without_its_library_it_says_what_to_install(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == "simpy" or name.startswith("axon_ps_lab.simulate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert main(["simulate", str(scenario)]) == 2
    assert "pip install axon-ps[simulate]" in capsys.readouterr().err
