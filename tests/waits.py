"""Finds the places in Python sources where a thread or a task may wait, by reading them.

What is found, in the words of `waits.md`:

- a call of a method that blocks (`_BLOCKING`), and an `await` of anything that is not a coroutine of this package: what
  the package's own coroutines wait for is found in them;
- `async for`, and entering a lock whose holders wait or do input and output while they hold it;
- a loop that does any of this again and again without an end of its own;
- a `Deadline` or `asyncio.timeout` that may be without an end.

Not a wait is what shows its end: a time-out that is a number (an argument such as `timeout=`, `left_s`,
`deadline.remaining()`, or an `async with asyncio.timeout(...)` around it). A time-out that may be None is none.

Names are all that this goes by. It knows no types and follows no values further than one assignment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BLOCKING = _words(
    """
    accept acquire communicate done_writing drain flock futex_wait get join lockf outcome poll read readexactly
    readline recv recv_bytes recv_into recv_multipart recvmsg result run_forever run_until_complete select
    sendall serve_forever shield shutdown synchronize wait wait3 wait4 wait_closed wait_for wait_for_connection
    wait_for_termination waitid waitpid write
    """
)
"""Names of methods that block, or whose coroutines wait for another process or task."""

_SIZED = _words(
    """
    accept read readexactly readline recv recv_bytes recv_into recv_multipart recvmsg sendall write
    """
)
"""Those of them whose numbers are sizes, not seconds."""

_ONLY_AWAITED = _words(
    """
    read write get drain done_writing poll
    """
)
"""Those of them that do not block where they are not awaited: files, dictionaries, `Popen.poll`."""

_ASKS = _words(
    """
    _exchange all_gather all_reduce barrier broadcast call kv_compare_and_set kv_get kv_wait put register run
    sleep upload wait_complete wait_initialized
    """
)
"""Names of this package's functions that ask other processes: to do so in a loop, or with a lock, may take for ever."""

_COLLECTORS = frozenset({"gather", "as_completed"})
"""Of `asyncio` and `concurrent.futures` only: our groups gather too."""

_LOCKS = re.compile(r"(lock|mutex|semaphore|condition|changed|writing|registering|running|pulling|naming|order)s?$")
"""The last word of what holds a lock."""

_TIME = re.compile(r"(_s|_S|timeout|deadline|remaining|grace|left|limit|patience|TIMEOUT|WAIT)$")
"""The last word of a number of seconds, or of what has some left."""

_ENDS_LOOP = re.compile(r"(deadline|until|remaining|left_s|limit_s|timeout_s|ends|monotonic|expired)$")
"""What a loop that watches the time mentions."""


class Wait(NamedTuple):
    """One place: the file, the function in it, and what it waits for as it stands there."""

    file: str
    function: str
    code: str


def find(sources: dict[str, str]) -> dict[Wait, int]:
    """The waits of some modules, given as path to text; to each the line where it stands (first)."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    coroutines = {n.name for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)}
    return {wait: line for name, tree in trees.items() for wait, line in reversed(list(_found(name, tree, coroutines)))}


def _found(name: str, tree: ast.Module, coroutines: set[str]) -> Iterator[tuple[Wait, int]]:
    visitor = _Visitor(coroutines)
    visitor.visit(tree)
    for function, code, line in visitor.found:
        yield Wait(name, function, code), line


class _Visitor(ast.NodeVisitor):
    """Walks one module. `found`: function, code and line of every wait."""

    def __init__(self, coroutines: set[str]) -> None:
        self.found: list[tuple[str, str, int]] = []
        self._coroutines = coroutines
        self._path: list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = []
        self._in_time = False  # inside of `async with asyncio.timeout(...)`
        self._awaited: set[ast.AST] = set()

    # ------------------------------------------------------------------ where we are

    def _visit_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        in_time, self._in_time = self._in_time, False
        self._path.append(node)
        self.generic_visit(node)
        self._path.pop()
        self._in_time = in_time

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_scope

    def _add(self, code: str, node: ast.expr | ast.stmt) -> None:
        if not self._in_time:
            self.found.append((".".join(n.name for n in self._path) or "module", code, node.lineno))

    # ------------------------------------------------------------------ what waits

    def visit_Await(self, node: ast.Await) -> None:
        value = node.value
        self._awaited.add(value)
        if not isinstance(value, ast.Call):
            self._add(f"await {_short(value)}", node)
        elif self._is_other(value):
            self._add(f"await {_short(value.func)}()", node)
        self.generic_visit(node)

    def _is_other(self, call: ast.Call) -> bool:
        """Whether an awaited call is neither of this package, nor one that `visit_Call` looks at."""
        name = _name(call.func)
        if name in self._coroutines or name in _BLOCKING or name in _COLLECTORS:
            return False
        return not self._ends(call)

    def visit_Call(self, node: ast.Call) -> None:
        if self._waits(node):
            self._add(f"{_short(node.func)}()", node)
        elif _name(node.func) in ("Deadline", "timeout") and node.args and self._may_be_endless(node.args[0]):
            self._add(f"{_short(node.func)}({_short(node.args[0])})", node)
        in_time = self._in_time
        self._in_time |= _name(node.func) == "wait_for" and self._ends(node)
        self.generic_visit(node)
        self._in_time = in_time

    def _waits(self, call: ast.Call) -> bool:
        name = _name(call.func)
        code = _short(call.func)
        if name in _COLLECTORS:
            return code.startswith(("asyncio.", "futures.", "concurrent.futures.")) and not self._ends(call)
        if code.startswith("subprocess.") and name in ("run", "call", "check_call", "check_output"):
            return not self._ends(call)
        if name not in _BLOCKING or not isinstance(call.func, ast.Attribute):
            return False
        if (name == "select" and not code.startswith("select")) or "socket.SHUT" in ast.unparse(call):
            return False  # a tensor's, and half of a connection
        if name == "join" and call.args:  # of strings, or in time
            return self._is_time(call.args[0]) and not self._ends(call)
        if name in _ONLY_AWAITED and call not in self._awaited:
            return (
                name == "get" and all(map(_is_flag, call.args)) and not self._ends(call)
            )  # a queue's, no dictionary's
        return not self._ends(call)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._add(f"async for {_short(node.iter)}", node)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self._add(f"async for {_short(node.iter)}", node.iter)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        mentions = {_name(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
        self._visit_loop(node, f"while {_short(node.test)}", not any(map(_ENDS_LOOP.search, mentions)))

    def visit_For(self, node: ast.For) -> None:
        endless = isinstance(node.iter, ast.Call) and _name(node.iter.func) in ("count", "cycle", "repeat")
        self._visit_loop(node, f"for {_short(node.iter)}", endless)

    def _visit_loop(self, node: ast.While | ast.For, code: str, endless: bool) -> None:
        """A loop is in the list where nothing that it waits for is."""
        before = len(self.found)
        self.generic_visit(node)
        if endless and len(self.found) == before and any(map(self._pauses, _own(node))):
            self._add(code, node)

    def _pauses(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if not isinstance(node, ast.Call) or _is_text_join(node):
            return False
        name = _name(node.func)
        return (name in _BLOCKING and name not in _ONLY_AWAITED) or name in _ASKS

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        in_time = self._in_time
        for item in node.items:
            code = _short(item.context_expr)
            if isinstance(item.context_expr, ast.Call):
                if _name(item.context_expr.func) == "timeout" and item.context_expr.args:
                    self._in_time = in_time or not self._may_be_endless(item.context_expr.args[0])
            elif _LOCKS.search(_name(_owner(item.context_expr))) and any(self._holds_up(n, code) for n in _own(node)):
                self._add(f"with {code}", node)
        self.generic_visit(node)
        self._in_time = in_time

    visit_AsyncWith = visit_With

    def _holds_up(self, node: ast.AST, lock: str) -> bool:
        """Whether something in the body of `with lock` may keep it for long; to wait for the lock itself frees it."""
        if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor):
            return True
        if not isinstance(node, ast.Call) or _is_text_join(node):
            return False
        of_lock = isinstance(node.func, ast.Attribute) and _short(node.func.value) == lock
        name = _name(node.func)
        if name in _ONLY_AWAITED:
            return False
        return not of_lock and (name in _BLOCKING or name in _ASKS)

    # ------------------------------------------------------------------ what ends it

    def _ends(self, call: ast.Call) -> bool:
        """Whether a call shows a time-out that ends it."""
        if _name(call.func) == "sleep":
            return not any(map(self._may_be_endless, call.args))
        named = [k.value for k in call.keywords if k.arg and _TIME.search(k.arg)]
        first = 1 if _name(call.func) == "wait_for" else 0
        sized = _name(call.func) in _SIZED
        times = named or [
            a for a in call.args[first:] if self._is_time(a) and not (sized and isinstance(a, ast.Constant))
        ]
        return bool(times) and not any(map(self._may_be_endless, times))

    def _is_time(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if isinstance(node, ast.Lambda | ast.Await | ast.List | ast.Set):
            return False
        return any(_TIME.search(_name(n)) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))

    def _may_be_endless(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether seconds may be None or infinite, as far as annotations and one assignment tell."""
        if isinstance(node, ast.Call) and _name(node.func) == "min":
            return all(self._may_be_endless(a, seen) for a in node.args)
        if isinstance(node, ast.Call) and _name(node.func).startswith("_limit"):
            return False  # what makes a limit of a time-out that may be None
        for n in ast.walk(node):
            if isinstance(n, ast.Constant) and (n.value is None or n.value == "inf" or n.value == -1):
                return True
            if isinstance(n, ast.Attribute) and (
                n.attr == "inf" or (_TIME.search(n.attr) and self._field_may_be_none(n))
            ):
                return True
            if (
                isinstance(n, ast.Name)
                and _TIME.search(n.id)
                and n.id not in seen
                and self._local_may_be_none(n.id, seen | {n.id})
            ):
                return True
        return False

    def _local_may_be_none(self, name: str, seen: frozenset[str]) -> bool:
        for scope in reversed(self._path):
            if isinstance(scope, ast.ClassDef):
                continue
            if (known := _argument_may_be_none(scope.args, name)) is not None:
                return known
            values = list(_assigned(scope, name))
            if values:
                return any(self._may_be_endless(v, seen) for v in values)
        return name == "NEVER"

    def _field_may_be_none(self, node: ast.Attribute) -> bool:
        """Whether `self.field` is declared with None: in the class, or as the argument of its `__init__`."""
        owner = next((n for n in reversed(self._path) if isinstance(n, ast.ClassDef)), None)
        if owner is None or not isinstance(node.value, ast.Name) or node.value.id != "self":
            return False
        for n in ast.walk(owner):
            if isinstance(n, ast.AnnAssign) and _name(n.target) == node.attr:
                return _is_optional(n.annotation)
            if isinstance(n, ast.FunctionDef) and n.name == "__init__":
                known = _argument_may_be_none(n.args, node.attr.lstrip("_"))
                if known is not None:
                    return known
        return False


def _argument_may_be_none(arguments: ast.arguments, name: str) -> bool | None:
    """Whether an argument is declared with None, or None by default; None: there is no such argument."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for a, default in (
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        if a.arg == name:
            return _is_optional(a.annotation) or (isinstance(default, ast.Name) and default.id == "NEVER")
    return None


def _is_optional(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(
        (isinstance(n, ast.Constant) and n.value is None) or _name(n) in ("Optional", "Seconds")
        for n in ast.walk(annotation)
    )


def _assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    for n in ast.walk(scope):
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.NamedExpr) else []
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            yield n.value  # type: ignore[attr-defined]


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a statement, functions that are only defined there aside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own(child)


def _is_text_join(node: ast.Call) -> bool:
    return _name(node.func) == "join" and bool(node.args)


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _owner(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node


def _name(node: ast.AST) -> str:
    """The last word of `a.b.c` or `c`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _short(node: ast.expr) -> str:
    """The code as it may stand in a cell of a table: arguments in brackets are left out where they are long."""
    text = " ".join(ast.unparse(node).split()).replace("|", "/")
    return text if len(text) <= 60 else f"{text[:57]}..."
