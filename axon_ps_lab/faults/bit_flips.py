"""Bit flips in a shard server's memory, made on request.

The module is a plugin of shard servers, for `--plugins axon_ps_lab.faults.bit_flips` and a directory in the variable
`AXON_PS_BIT_FLIPS`. A server with it listens on a Unix socket in that directory, and changes a bit for each call of
`flip`. The bit is of values, a moment or a summed gradient. It is changed on the thread of the event loop, so that
nothing else changes meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from axon_ps.errors import Unreachable
from axon_ps.shard.core.digests import GRADIENT
from axon_ps.shard.core.slices import OwnedSlice

DIRECTORY: Final = "AXON_PS_BIT_FLIPS"
ANSWER_S: Final = 10.0
"""Seconds that a server may take to find something to change."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A bit that was changed.

    Attributes:
        slice: number of the slice in the plan.
        unit: number of the unit in the layout.
        array: "param", "gradient" or the name of a moment.
        element: number of the element, from the unit's start.
        bit: number of the bit in the f32, 0 = the lowest.
        version: version of the slice at that time.
    """

    slice: int
    unit: int
    array: str
    element: int
    bit: int
    version: int


def flip_in(slices: Iterable[OwnedSlice], choice: random.Random, arrays: Iterable[str] = ()) -> Flip | None:
    """Change a bit of one of the slices; None if they hold nothing that a coming commit reads.

    Args:
        slices: the slices of a server.
        choice: chooses the array, the element and the bit.
        arrays: names of the arrays that may be changed; empty = all.
    """
    there = [s for s in slices if s.trainable and not (s.lacking or s.copying or s.corrupt or s.applying)]
    found: list[tuple[OwnedSlice, str, Any, slice]] = []
    for owned in sorted(there, key=lambda s: (s.chunks.unit, s.chunks.begin)):
        for name, array in owned.master.arrays().items():
            found.append((owned, name, array, slice(0, array.size)))
        for sums in owned.accumulators:
            summed = [i for i, present in enumerate(sums.present) if present]
            if summed and not sums.spoiled:
                found.append((owned, GRADIENT, sums.array, owned.chunks.ranges[choice.choice(summed)]))
    wanted = set(arrays)
    found = [each for each in found if not wanted or each[1] in wanted]
    if not found:
        return None
    owned, name, array, within = choice.choice(found)
    element, bit = choice.randrange(within.start, within.stop), choice.randrange(32)
    array.view(np.uint32)[element] ^= np.uint32(1 << bit)
    return Flip(
        slice=owned.number,
        unit=owned.chunks.unit,
        array=name,
        element=owned.chunks.begin + element,
        bit=bit,
        version=owned.reached,
    )


def is_changed(owned: OwnedSlice) -> bool:
    """Return True if a slice does not hold what was written to it, whether or not the server has found that."""
    if owned.lacking or owned.corrupt or owned.corruptions:
        return True
    sums = [(s, i) for s in owned.accumulators for i, present in enumerate(s.present) if present]
    blocks = owned.chunks.blocks_of
    wrong = any(list(s.digests.check(s.array.view(np.uint32), blocks(i, i + 1))) for s, i in sums)
    return wrong or bool(owned.master.check(0, len(owned.chunks.bounds)))


class Slices:
    """The slices that a process has made and still has."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[OwnedSlice] = weakref.WeakSet()

    def __iter__(self) -> Any:
        return iter(list(self._all))

    def watch(self) -> None:
        """Collect the slices that are made from now on."""
        make = OwnedSlice.__init__

        def made(owned: OwnedSlice, *args: Any, **keywords: Any) -> None:
            make(owned, *args, **keywords)
            self._all.add(owned)

        OwnedSlice.__init__ = made  # type: ignore[method-assign, assignment]


def flip(directory: Path, pid: int, seed: int, arrays: Iterable[str] = ()) -> Flip | None:
    """Change a bit in a shard server; None if it holds nothing that a coming commit reads, or has applied no step yet.

    Args:
        directory: the server's `AXON_PS_BIT_FLIPS`.
        pid: process id of the server.
        seed: seed of the choice of the bit.
        arrays: names of the arrays that may be changed; empty = all.

    Raises:
        Unreachable: the server does not answer.
    """
    order = json.dumps({"seed": seed, "arrays": list(arrays)}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(ANSWER_S + 1.0)
            server.connect(str(_path(directory, pid)))
            server.send(order)
            answer = json.loads(server.recv(1 << 12) or b"null")
    except OSError as error:
        raise Unreachable(f"shard server {pid} changes no bits: {error}") from error
    return None if answer is None else Flip(**answer)


def _path(directory: Path, pid: int) -> Path:
    return directory / f"{pid}.flips"


def _serve(directory: Path) -> None:
    """Watch the slices of this process, and change bits on request."""
    slices = Slices()
    slices.watch()
    loops: list[asyncio.AbstractEventLoop] = []
    begin = OwnedSlice._begin  # called on the loop's thread

    def noted(owned: OwnedSlice, *args: Any) -> int:
        if not loops:
            loops.append(asyncio.get_running_loop())
        return begin(owned, *args)

    OwnedSlice._begin = noted  # type: ignore[method-assign, assignment]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = _path(directory, os.getpid())
    path.unlink(missing_ok=True)  # of an earlier process: process ids are used again
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            caller, _ = listener.accept()
            with caller:
                order = json.loads(caller.recv(1 << 12) or b"{}")
                done: list[Flip | None] = []
                answered = threading.Event()

                def change(order: Any = order, done: Any = done, answered: Any = answered) -> None:
                    done.append(flip_in(slices, random.Random(order["seed"]), order["arrays"]))
                    answered.set()

                if order and loops:
                    loops[0].call_soon_threadsafe(change)
                    answered.wait(ANSWER_S)
                changed = done[0] if done else None
                caller.send(json.dumps(None if changed is None else asdict(changed)).encode())

    threading.Thread(target=serve, name="bit flips", daemon=True).start()


if DIRECTORY in os.environ:
    _serve(Path(os.environ[DIRECTORY]))
