"""The documentation: every command is one that there is, every file is one that is read. (`make pages` runs it.)"""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from axon_ps import plugins
from axon_ps.cli.settings import Settings
from axon_ps_lab.__main__ import campaigns
from axon_ps_lab.chaos import campaign
from axon_ps_lab.simulate.scenario import Scenario
from page import ROOT, Block, blocks, label, named, shell_blocks
from parsed_commands import entry_point, understood


@pytest.mark.parametrize(("page", "block"), [f for f in shell_blocks() if not f[1].has_an_effect], ids=label)
def test_a_command_that_is_not_run_is_one_that_there_is(
    page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in block.commands:
        for file in (w for w in words if w.endswith((".pem", ".key")) or w == "token"):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()  # the block before makes them
        match words:
            case ["axon-ps" | ".venv/bin/axon-ps", *arguments]:
                understood(arguments)
            case ["make", target]:
                targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
                assert target in targets
            case ["make", "lab", name, *_]:
                assert name.removeprefix("NAME=") in campaigns()
            case ["docker-compose", action, *arguments]:
                services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
                assert action in ("up", "logs", "run", "down", "kill", "start")
                scaled = {w.partition("=")[0] for o, w in pairwise(arguments) if o == "--scale"}
                named = {w for w in arguments if not w.startswith("-") and "=" not in w} | scaled
                if action == "run":
                    name = arguments[arguments.index("--entrypoint") + 2]
                    understood(arguments[arguments.index(name) + 1 :])
                    named = {name}
                assert named <= set(services)
            case ["docker", "build", "-f", file, "-t", image, *arguments, "."]:
                text = (ROOT / file).read_text()
                assert f"services/{image.removeprefix('axon-ps-').partition(':')[0]}/Dockerfile" == file
                for option, given in zip(arguments[::2], arguments[1::2], strict=True):
                    assert option in ("--build-arg", "--target")
                    stage = f" AS {given}\n"
                    assert (stage if option == "--target" else f"\nARG {given.partition('=')[0]}=") in text
            case ["docker", "run", *arguments]:
                begin = next(i for i, w in enumerate(arguments) if w.startswith("axon-ps-"))
                service = arguments[begin].removeprefix("axon-ps-")
                understood([*entry_point(service), *arguments[begin + 1 :]])
            case ["pip", "install", what]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                named_extras = re.fullmatch(r"(?:axon-ps|\.)(?:\[([\w,]+)\])?", what)
                assert named_extras is not None
                assert set((named_extras[1] or "torch").split(",")) <= set(extras)
            case ["curl", url]:
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+/(metrics|healthz)", url)
            case ["export", *variables]:
                described = (ROOT / "docs" / "environment.md").read_text()
                for name, _, value in (v.partition("=") for v in variables):
                    assert f"`{name}`" in described or (name, value) == ("COMPOSE_PROFILES", "cuda")
            case _:
                raise AssertionError(f"{page.name} has a command that nobody checks: {words}")


@pytest.mark.parametrize(("page", "block"), named("toml"), ids=label)
def test_a_configuration_file_is_one(page: Path, block: Block) -> None:
    given = tomllib.loads(block.text)
    if "project" in given:
        assert set(given["project"]["entry-points"]) == {plugins.ENTRY_POINTS}
    elif page.name == "chaos.md":
        assert campaign.parse(block.text, page.name).faults
    elif page.name == "simulate.md":
        assert Scenario.of(given).num_hosts
    else:
        assert set(given) <= set(Settings.model_fields)


@pytest.mark.parametrize(("page", "block"), named("dockerfile"), ids=label)
def test_a_dockerfile_is_made_of_an_image_of_ours(page: Path, block: Block) -> None:
    instructions = [line.split(maxsplit=1)[0] for line in block.text.splitlines()]
    assert set(instructions) <= {"FROM", "COPY", "CMD", "USER", "RUN"}
    image = re.match(r"FROM axon-ps-(worker)(:with-tools)?\n", block.text)
    assert image is not None, f"{page.name}: not of an image of ours"
    if "RUN" in instructions:
        assert image[2], "the image that runs has no shell"
        assert 'RUN ["python3", "/app/only_python.py"]\nUSER 10001:10001\n' in block.text


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```python\nx = 1\n```\n", "no shell block runs"),
        ("```python\nx = 1\n```\n\n```sh\nmake test\n```\n", "runs no script"),
        ("```\nx\n```\n", "of ''"),
        ("So:\n\n    axon-ps run x.py\n", "no fence"),
    ],
)
def test_a_block_that_would_not_be_tried_is_found(page: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        blocks(page)


def test_python_blocks_are_one_script_up_to_the_command_that_runs_it() -> None:
    page = "```python\na\n```\n\n```python\nb\n```\n\n```sh\nX=1 axon-ps run one.py \\\n  --more  # so\n```\n"
    page += "```python\nc\n```\n\n```sh\npython two.py\n```\n"
    one, two = (block for block in blocks(page) if block.language == "sh")
    assert one.scripts == (("one.py", "a\n\nb\n\n"),)
    assert one.commands == [["axon-ps", "run", "one.py", "--more"]]
    assert two.scripts == (("two.py", "c\n\n"),)


def test_a_block_that_begins_with_a_files_name_is_that_file() -> None:
    page = "```python\n# a.py\nx = 1\n```\n\n```python\nb\n```\n\n```sh\npython b.py\n```\n"
    *_, block = blocks(page)
    assert block.scripts == (("a.py", "# a.py\nx = 1\n"), ("b.py", "b\n\n"))
    with pytest.raises(AssertionError, match=r"no shell block runs .*a\.py"):
        blocks("```python\n# a.py\n```\n")
