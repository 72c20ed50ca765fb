"""`make lab NAME=house`: measures of the packages: sizes, circles of imports, names used twice, debts.

    python tests/house.py                the measures
    python tests/house.py --debts NAME   the places of a debt: `circles`, `docstrings`, ...
    python tests/house.py --subjects     fails if the subject of a commit that is not on main yet is too long
    python tests/house.py --sample 7     25 docstrings and comments, drawn with the seed 7, to be read by a newcomer

`test_house.py` holds them. A measure counts what a reader sees: all lines, and all imports. Generated code (`wire/v1`)
is left out.

Note: [Debts]
    A measure that is not yet what it should be is a debt: `DEBTS` has how many places there are. One more fails the
    tests, and so does one fewer until the number is lowered, so that it only falls.
"""

from __future__ import annotations

import ast
import io
import random
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MAX_FILES = 18
"""Python files in one folder."""

MAX_CLASS = 350
"""Lines of a class, all of them."""

MAX_CLASS_CODE = 350
"""Lines of a class, without docstrings, comments, empty lines, and the signatures of overloads."""

MAX_MODULE = 600
"""Lines of a module, likewise."""

SMALL_MODULE = 100
"""A module below this that one other module imports is counted."""

MAX_SUBJECT = 72
"""Characters of a commit's subject."""

DEBTS = {
    "circles": 0,
    "cores": 2,
    "classes": 3,
    "names": 9,
    "docstrings": 0,
    "phrases": 0,
    "unnamed": 1,
}
"""Places that each debt has; see Note: [Debts]."""

INSIDE = ("axon_ps_lab.engine_driver", "axon_ps_lab.fuzz", "axon_ps_lab.interleavings")
"""The laboratory's rooms that test cores from inside."""

SAMPLE = 25
"""How many docstrings and comments are drawn."""

WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        seat seats meeting meetings opening openings letter letters post posted mail word words say says said
        hear hears heard tell tells told share shares piece pieces part parts portion portions flow flows relay
        passage passages pace reach introduce introduction lend lends lent lender loan loans borrow borrower
        gate gates cell cells parity lane lanes alone ahead foresee foreseen foresight assume assumed adopt
        adopted owed owes hold holds passed keep keeps kept whole freed hidden shown ledger room rooms turn turns place
        places standing marks churn due
        """,
    )
)
"""Words that were ours alone, for which docs/glossary.md has those of the field."""

OPENERS = frozenset({"What", "How", "Where", "Who", "Whoever", "Which", "Whose"})
"""Words with which no docstring begins: a reader has to wait for what it is about."""

PHRASES = re.compile(r"\b(?:nobody|whoever|one that|of before)\b", re.IGNORECASE)
"""Phrases with which no text says who acts."""

NOT_OURS = {
    "flow_control": "the field's",
    "_FlowControl": "the field's",
    "__post_init__": "Python's",
    "_PUNCH_HOLE_KEEP_SIZE": "Linux's",
    "hidden_size": "the word of models",
    "keep_vars": "torch's",
    "share_memory": "torch's",
    "keep_graph": "torch's",
    "set_post_optim_event": "torch's",
    "in_place": "the field's",
    "_in_place": "the field's",
    "round_in_place": "the field's",
    "passed": "pytest's, of tests",
}
"""Names that have such a word, and whose they are."""

_TOKENS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the package: its dotted name, its path under the root, its text."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @cached_property
    def code(self) -> frozenset[int]:
        """Numbers of the lines that are neither empty nor a comment nor part of a docstring."""
        documented = set()
        for node in ast.walk(self.tree):
            first = node.body[0] if isinstance(node, _DOCUMENTED) and node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        return frozenset(
            n for n, line in lines if n not in documented and line.strip() and not line.lstrip().startswith("#")
        )

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        """All classes."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def identifiers(self) -> Iterator[tuple[str, int]]:
        """Names that the module makes, and where: of functions, classes, arguments, variables and attributes."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name, node.lineno
            elif isinstance(node, ast.arg):
                yield node.arg, node.lineno
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, node.lineno
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr, node.lineno


def room_of(name: str) -> str:
    """The room of a module: a package of the product; the laboratory is one."""
    package, _, inner = name.partition(".")
    return package if package == LABORATORY else inner.partition(".")[0]


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


PRODUCT, LABORATORY = "axon_ps", "axon_ps_lab"
"""The packages: a measure is of both, and sizes are of each."""


def modules(root: Path = ROOT) -> dict[str, Module]:
    """The packages' modules by dotted name."""
    found = {}
    for path in sorted(path for package in (PRODUCT, LABORATORY) for path in (root / package).rglob("*.py")):
        where = path.relative_to(root)
        if where.parts[1:3] != ("wire", "v1"):
            name = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name=name, path=where.as_posix(), text=path.read_text(encoding="utf-8"))
    return found


def imports(all_modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules of the package that each one imports: inside functions and for type checkers, too."""
    found: dict[str, set[str]] = {name: set() for name in all_modules}
    for name, module in all_modules.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("axon_ps"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name].add(inner if inner in all_modules else node.module)
            elif isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names if alias.name in all_modules)
        found[name] &= set(all_modules) - {name}
    return found


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Modules that import each other, directly or not: the strongly connected components (Tarjan) of more than one."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def folder_sizes(all_modules: Mapping[str, Module]) -> Counter[str]:
    """How many modules lie in each folder, without its `__init__`."""
    return Counter(m.path.rpartition("/")[0] for m in all_modules.values() if not m.path.endswith("/__init__.py"))


def class_sizes(all_modules: Mapping[str, Module]) -> dict[str, tuple[int, int]]:
    """Per class, as module.Class, its lines of code and all its lines; the largest first."""
    sizes = {}
    for name, module in all_modules.items():
        for node in module.classes:
            span, code = _lines(node), set(module.code)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and any(map(_is_overload, inner.decorator_list)):
                    code.difference_update(range(inner.decorator_list[0].lineno, _lines(inner).stop))
            sizes[f"{name}.{node.name}"] = len(code.intersection(span)), len(span)
    return dict(sorted(sizes.items(), key=lambda item: -item[1][0]))


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_overload(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "overload"


def module_sizes(all_modules: Mapping[str, Module]) -> Counter[str]:
    """Lines of code of each module."""
    return Counter({name: len(module.code) for name, module in all_modules.items()})


def private_words(all_modules: Mapping[str, Module]) -> list[str]:
    """Names made of `WORDS`, and the line that makes each first."""
    found: dict[tuple[str, str], int] = {}
    for module in all_modules.values():
        for name, line in module.identifiers():
            if name not in NOT_OURS and WORDS & {token.lower() for token in _TOKENS.findall(name)}:
                found.setdefault((module.path, name), line)
    return [f"{path}:{line} {name}" for (path, name), line in sorted(found.items())]


def double_classes(all_modules: Mapping[str, Module]) -> list[str]:
    """Public names that two classes of different rooms have."""
    rooms = defaultdict(set)
    for name, module in all_modules.items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(room_of(name))
    return sorted(name for name, where in rooms.items() if len(where) > 1)


def double_files(all_modules: Mapping[str, Module]) -> list[str]:
    """File names that two rooms have, but for those that name a role."""
    rooms = defaultdict(set)
    for name, module in all_modules.items():
        rooms[module.path.rpartition("/")[2]].add(room_of(name))
    return sorted(file for file, where in rooms.items() if len(where) > 1 and file != "__init__.py")


def lonely_modules(all_modules: Mapping[str, Module]) -> list[str]:
    """Small modules that one module of another folder imports, and nobody else."""
    users = defaultdict(set)
    for name, used in imports(all_modules).items():
        for other in used:
            users[other].add(name)
    return sorted(
        name
        for name, module in all_modules.items()
        if len(users[name]) == 1
        and len(module.text.splitlines()) < SMALL_MODULE
        and not module.path.endswith("__init__.py")
        and all_modules[next(iter(users[name]))].path.rpartition("/")[0] != module.path.rpartition("/")[0]
    )


def foreign_cores(all_modules: Mapping[str, Module]) -> list[str]:
    """Imports of a core by a module of another room, but for what tests cores from inside, as unit tests do."""
    return sorted(
        f"{name} -> {other}"
        for name, used in imports(all_modules).items()
        for other in used
        if ".core" in other and room_of(other) != room_of(name) and not name.startswith(INSIDE)
    )


def vague_docstrings(all_modules: Mapping[str, Module]) -> list[str]:
    """Docstrings that begin with one of `OPENERS`."""
    found = []
    for module in all_modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                first = re.match(r"\W*(\w*)", text)
                if first is not None and first[1] in OPENERS:
                    found.append(f"{module.path}:{node.body[0].lineno} {text.splitlines()[0]}")
    return sorted(found)


def vague_phrases(all_modules: Mapping[str, Module]) -> list[str]:
    """`PHRASES` in docstrings and comments."""
    return [f"{where} {phrase}" for where, text in texts(all_modules) for phrase in PHRASES.findall(text)]


def unnamed_modules(all_modules: Mapping[str, Module], root: Path = ROOT) -> list[str]:
    """Modules of the product that no file in a folder of tests names: `room/module.py`, or `axon_ps.room.module`."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "tests").glob("*/**/*.py")))
    named = set(re.findall(r"[\w/]+\.py\b|\baxon_ps[\w.]+", text))
    for package, names in re.findall(r"from (axon_ps[\w.]*) import (\([^)]*|.*)", text):
        named.update(f"{package}.{name}" for name in re.findall(r"\w+", names))
    return [
        name
        for name, module in all_modules.items()
        if name.startswith(f"{PRODUCT}.") and not module.path.endswith(("/__init__.py", f"{PRODUCT}/version.py"))
        if name not in named and module.path.removeprefix(f"{PRODUCT}/") not in named
    ]


def debts(all_modules: Mapping[str, Module], root: Path = ROOT) -> dict[str, list[str]]:
    """The places of each debt."""
    return {
        "circles": [" <-> ".join(circle) for circle in circles(imports(all_modules))],
        "cores": foreign_cores(all_modules),
        "classes": [f"{n} {name}" for name, (_, n) in class_sizes(all_modules).items() if n > MAX_CLASS],
        "names": double_classes(all_modules),
        "docstrings": vague_docstrings(all_modules),
        "phrases": vague_phrases(all_modules),
        "unnamed": unnamed_modules(all_modules, root),
    }


def long_subjects(root: Path = ROOT) -> list[str]:
    """The subjects above `MAX_SUBJECT` of commits that are not on `origin/main`; none where there is no such branch."""
    log = ["git", "log", "--format=%s", "origin/main..HEAD"]
    done = subprocess.run(log, cwd=root, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if len(line) > MAX_SUBJECT]


def texts(all_modules: Mapping[str, Module]) -> list[tuple[str, str]]:
    """Docstrings and blocks of comments, and where each is."""
    found = []
    for module in all_modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
                found.append((f"{module.path}:{node.body[0].lineno}", text))
        tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
        comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT and t.string[:4] != "# --"}
        for line in sorted(comments.keys() - {n + 1 for n in comments}):
            block = [comments[line]]
            while (after := line + len(block)) in comments:
                block.append(comments[after])
            found.append((f"{module.path}:{line}", "\n".join(block)))
    return sorted(found)


def sample(seed: int) -> None:
    """Print some docstrings and comments."""
    for where, text in random.Random(seed).sample(texts(modules()), SAMPLE):
        print(f"{where}\n{textwrap.indent(text, '    ')}\n")


def main() -> None:
    """Print the measures."""
    if sys.argv[1:2] == ["--sample"]:
        sample(int(sys.argv[2]))
        return
    if sys.argv[1:] == ["--subjects"]:
        if found := long_subjects():
            sys.exit("\n".join([f"subjects of commits have at most {MAX_SUBJECT} characters:", *found]))
        return
    all_modules = modules()
    if sys.argv[1:2] == ["--debts"]:
        print(*debts(all_modules)[sys.argv[2]], sep="\n")
        return
    for package in (PRODUCT, LABORATORY):
        inside = {name: module for name, module in all_modules.items() if name.partition(".")[0] == package}
        lines = sum(len(m.text.splitlines()) for m in inside.values())
        code = sum(module_sizes(inside).values())
        print(f"{package}: {len(inside)} modules, {lines} lines, {code} of them code")
    print("largest folders:", ", ".join(f"{name} {n}" for name, n in folder_sizes(all_modules).most_common(5)))
    print("debts:", ", ".join(f"{name} {len(places)}" for name, places in debts(all_modules).items()))
    sizes = class_sizes(all_modules)
    print("largest classes, code and all lines:")
    for name, (size, span) in list(sizes.items())[:10]:
        print(f"  {size:5d} {span:5d}  {name}")
    print("largest modules, code:", ", ".join(f"{name} {n}" for name, n in module_sizes(all_modules).most_common(5)))
    print("class names in several rooms:", ", ".join(double_classes(all_modules)) or "none")
    print("file names in several rooms:", ", ".join(double_files(all_modules)) or "none")
    lonely = lonely_modules(all_modules)
    print(f"small modules with one user, in another folder: {len(lonely)}", *lonely, sep="\n  ")
    print("private words:", ", ".join(private_words(all_modules)) or "none")


if __name__ == "__main__":
    main()
