"""What a page of the documentation tells its reader to type, taken from its fenced blocks.

The Python blocks of a page, up to a shell block that names a .py file, are that file; one that begins with `# NAME.py`
is a file of its own. So a reader who saves them under the names, in an empty directory, and types the shell block has
what the test has.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import environment

ROOT = Path(__file__).parents[2]

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("services/*/README.md")])
HERE = ("openssl", "printf")
"""Tools whose commands are run, too."""

LONGEST_S = 110.0
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("python", "sh", "toml", "dockerfile", "text")
_OF_EXTRAS = re.compile(r"axon_ps\.(ray|huggingface|lightning)\b|transformers|(TensorBoard|Wandb|MLflow)Logger")
_FILE = re.compile(r"# (\w+\.py)\n")
_SCRIPT = re.compile(r"(?<![\w/])\w+\.py\b")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: one of `LANGUAGES`.
        text: what is in it.
        scripts: of a shell block, what the files are that the page made before it and that it names, by name.
    """

    language: str
    text: str
    scripts: tuple[tuple[str, str], ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether a shell block is run here: its scripts, or nothing but tools that there are."""
        return not self.needs_extras and self.has_an_effect

    @property
    def has_an_effect(self) -> bool:
        """Whether a shell block does more than name commands that need a cluster, an engine, a checkout."""
        return bool(self.scripts) or all(words[0] in HERE for words in self.commands)

    @property
    def needs_extras(self) -> bool:
        """True if a script needs libraries that only `make lab NAME=integrations` installs."""
        return any(_OF_EXTRAS.search(text) for _, text in self.scripts)

    def run(self, directory: Path, limit_s: float, variables: Mapping[str, str] = {}) -> str:
        """Save the files in a directory and type the block there; what is printed. Fails if it does not end well."""
        for name, script in self.scripts:
            (directory / name).write_text(script)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            ["bash", "-e", "-c", self.text],
            cwd=directory,
            env=environment({"PATH": path, **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # `axon-ps run` ends its processes
                output, _ = process.communicate()
        assert process.returncode == 0, output
        return output

    def try_in(self, directory: Path) -> str:
        """Run it as `run` does, or skip the test where a tool is not installed."""
        if (tool := self.commands[0][0]) in HERE and shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
        return self.run(directory, LONGEST_S)

    @property
    def commands(self) -> list[list[str]]:
        """A shell block's commands in words, without comments and without variables set before them."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [shlex.split(line, comments=True) for line in lines]
        return [list(_after_variables(words)) for words in found if words]


def _after_variables(words: list[str]) -> Iterator[str]:
    begun = False
    for word in words:
        begun = begun or re.match(r"[A-Z_]+=", word) is None
        if begun:
            yield word


def named(language: str, pages: Iterable[Path] = PAGES) -> list[tuple[Path, Block]]:
    """The blocks of a language, each with its page."""
    return [(page, block) for page in pages for block in blocks(page.read_text()) if block.language == language]


def shell_blocks(pages: Iterable[Path] = PAGES) -> list[tuple[Path, Block]]:
    """The shell blocks, each with its page."""
    return named("sh", pages)


def label(value: object) -> str:
    """What a page or a block is called among the tests."""
    if isinstance(value, Block):
        return value.scripts[0][0] if value.scripts else value.text.split("\n")[0][:40]
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def blocks(page: str) -> list[Block]:
    """The blocks of a page; fails where one would never be tried.

    Raises:
        AssertionError: a language is unknown, a code block has no fence, or Python that no shell block runs is left.
    """
    found: list[Block] = []
    files: list[tuple[str, str]] = []
    python = ""
    for match in FENCED.finditer(page):
        language, text = match["language"], match["text"]
        assert language in LANGUAGES, f"a block is of {language!r}; known are {', '.join(LANGUAGES)}"
        scripts: tuple[tuple[str, str], ...] = ()
        if language == "python" and (own := _FILE.match(text)):
            files.append((own[1], text))
        elif language == "python":
            python += text + "\n"
        elif language == "sh" and (python or files):
            runs = [name for name in _SCRIPT.findall(text) if name not in dict(files)]
            assert runs or not python, f"the shell block after Python runs no script: {text}"
            scripts, python, files = (*files, *([(runs[0], python)] if python else [])), "", []
        found.append(Block(language, text, scripts))
    left = [*files, python] if python else files
    assert not left, f"no shell block runs {left}"
    unfenced = re.findall(r"^(?! *[-*\d]).*\n\n {4}\S.*", FENCED.sub("", page), flags=re.MULTILINE)
    assert not unfenced, f"a code block has no fence: {unfenced}"
    return found
