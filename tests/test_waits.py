"""No wait of the package is without an end: `waits.md` lists them, and this compares (see `waits.py`)."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from waits import Wait, find

pytestmark = pytest.mark.usefixtures("without_collector")
ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("waits.md")
BY_HAND = {"campaigns", "containers", "fuzz", "interleavings", "upgrade"}
"""Rooms of the laboratory that are run from a checkout: `make test` and their user limit their time."""


def listed() -> dict[Wait, str]:
    """The rows of the page: what ends each wait."""
    room, rows = "", {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            room = line[3:].partition(":")[0]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].endswith(".py"):
            file, function, code, end = cells
            wait = Wait(f"{room}/{file}", function, code.strip("`"))
            assert wait not in rows, f"{wait} stands twice in tests/waits.md"
            rows[wait] = end
    return rows


def test_every_wait_of_the_package_is_in_the_list_with_what_ends_it() -> None:
    sources = {
        path.relative_to(ROOT).as_posix().removeprefix("axon_ps/"): path.read_text(encoding="utf-8")
        for package in ("axon_ps", "axon_ps_lab")
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "v1"  # generated
        if path.relative_to(ROOT).as_posix().split("/")[1] not in BY_HAND
    }
    found, rows = find(sources), listed()
    new = [f"{w.file}:{line} {w.function}: {w.code}" for w, line in sorted(found.items()) if w not in rows]
    assert not new, (
        "these waits show no end. Give each a time-out or a deadline, or, if something else ends it, a row in "
        "tests/waits.md that says what:\n" + "\n".join(new)
    )
    gone = [" | ".join(w) for w in sorted(rows) if w not in found]
    assert not gone, "tests/waits.md has rows of waits that are no more; take them out:\n" + "\n".join(gone)
    assert not [w for w, end in rows.items() if len(end) < 5], "a row of tests/waits.md does not say what ends its wait"


ENDLESS = {
    "a condition": "def f(self): self.changed.wait()",
    "a condition with a predicate": "def f(self): self.changed.wait_for(lambda: self.done)",
    "a future": "async def f(future): await future",
    "a future of a thread": "def f(future): return future.result()",
    "a queue": "def f(queue): return queue.get()",
    "a queue, blocking": "def f(queue): return queue.get(True)",
    "a queue of tasks": "async def f(queue): return await queue.get()",
    "a thread": "def f(thread): thread.join()",
    "a child": "def f(process): process.wait()",
    "a child's output": "def f(process): return process.communicate()",
    "a program": "def f(argv): subprocess.run(argv, check=True)",
    "a lock": "def f(self): self.lock.acquire()",
    "a lock around input": "def f(self):\n    with self.lock:\n        self.store.put('a', b'')",
    "a lock around a wait": "async def f(self):\n    async with self.writing:\n        await self.stream.send()",
    "a socket": "def f(sock): return sock.recv(64)",
    "a listener": "def f(sock): return sock.accept()",
    "descriptors": "def f(fd): select.select([fd], [], [])",
    "a stream's messages": "async def f(stream):\n    async for message in stream: print(message)",
    "a message": "async def f(stream): return await stream.read()",
    "room to write": "async def f(context, message): await context.write(message)",
    "a call": "async def f(stub, request): return await stub.Gather(request)",
    "tasks": "async def f(tasks): await asyncio.wait(tasks)",
    "all tasks": "async def f(tasks): await asyncio.gather(*tasks)",
    "a shielded task": "async def f(task): await asyncio.shield(task)",
    "a pool": "def f(pool): pool.shutdown()",
    "a file, in a thread": "async def f(): await asyncio.to_thread(open, 'a')",
    "a retry": "async def f():\n    while True:\n        await g()\nasync def g(): pass",
    "a poll": "def f(done):\n    while not done():\n        time.sleep(0.1)",
    "a time-out that may be None": "def f(event, timeout_s: float | None): event.wait(timeout_s)",
    "None by default": "def f(event, timeout_s: float | None = None):\n    left_s = timeout_s\n    event.wait(left_s)",
    "None of an object": (
        "class A:\n    def __init__(self, timeout_s: float | None): self._timeout_s = timeout_s\n"
        "    def f(self): self.event.wait(self._timeout_s)"
    ),
    "an infinite time-out": "def f(event): event.wait(timeout=math.inf)",
    "a deadline without an end": "def f(timeout_s: float | None): return Deadline(timeout_s)",
    "a limit that may be None": (
        "async def f(future, limit_s: float | None):\n    async with asyncio.timeout(limit_s):\n        await future"
    ),
    "a function in a limit": (
        "async def f(future):\n    async with asyncio.timeout(1):\n        async def g(): await future\n        go(g)"
    ),
}

ENDING = {
    "a condition": "def f(self, timeout_s: float): self.changed.wait(timeout_s)",
    "a condition with a predicate": "def f(self, left_s: float): self.changed.wait_for(lambda: self.done, left_s)",
    "a future": "async def f(future):\n    async with asyncio.timeout(5.0):\n        await future",
    "a future of a thread": "def f(future): return future.result(timeout=5)",
    "a queue": "def f(queue): return queue.get(timeout=WAIT_S)",
    "a queue, blocking": "def f(queue): return queue.get(True, 5.0)",
    "a queue of tasks": "async def f(queue, deadline): await asyncio.wait_for(queue.get(), deadline.remaining())",
    "a thread": "def f(thread): thread.join(2 * GRACE_S)",
    "a child": "def f(process, deadline): process.wait(max(0.0, deadline - time.monotonic()))",
    "a child's output": "def f(process): return process.communicate(timeout=5.0)",
    "a program": "def f(argv): subprocess.run(argv, check=True, timeout=60)",
    "a lock": "def f(self): self.lock.acquire(timeout=5.0)",
    "a lock around arithmetic": "def f(self):\n    with self.lock:\n        self.count += 1",
    "a condition's own lock": "def f(self, left_s: float):\n    with self.changed:\n        self.changed.wait(left_s)",
    "descriptors": "def f(fd, deadline): select.select([fd], [], [], deadline.remaining())",
    "a call": "async def f(stub, request): return await stub.Gather(request, timeout=5.0)",
    "tasks": "async def f(tasks, timeout_s: float): await asyncio.wait(tasks, timeout=timeout_s)",
    "a retry": (
        "async def f(deadline):\n    while True:\n        await g()\n        if deadline.expired: raise Timeout\n"
        "async def g(): pass"
    ),
    "a poll": "def f(done, ends):\n    while not done() and time.monotonic() < ends:\n        time.sleep(0.1)",
    "a limit made of a time-out": "def f(self, timeout_s: float | None): return Deadline(self._limit(timeout_s))",
    "one of two time-outs": "def f(event, timeout_s: float | None): event.wait(min(timeout_s or 1.0, 2.0))",
    "a coroutine of ours": "async def f(): await g()\nasync def g(): pass",
    "what is no wait": "def f(a, b): return ', '.join(a), b.get('key'), b.get('key', 0), a.read(5), os.path.join(a, b)",
    "a nap": "async def f(): await asyncio.sleep(1.0)",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_planted_wait_without_an_end_is_found(source: str) -> None:
    assert find({"planted.py": textwrap.dedent(source)})


@pytest.mark.parametrize("source", ENDING.values(), ids=ENDING)
def test_a_wait_that_shows_its_end_needs_no_row(source: str) -> None:
    assert not find({"planted.py": textwrap.dedent(source)})


def test_a_wait_is_named_by_file_function_and_code() -> None:
    source = (
        "class A:\n    async def f(self):\n        while not self.done:\n            await self.waiters.wait(unit)\n"
    )
    assert find({"room/a.py": source}) == {Wait("room/a.py", "A.f", "self.waiters.wait()"): 4}
