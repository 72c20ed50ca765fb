"""The program that compiles every loop of a job, for all element types and options, once per machine.

    python -m axon_ps.shard.loops

Owns: the list of loops with their types, and the program that compiles them. `make setup` and the images run it. If it
was not run, `axon-ps run` and `LocalCluster` run it before they start processes that have deadlines. Refuses: loops of
plugins, which their processes compile. The program is not needed, since a process compiles any loop that it finds
missing.

Invariant: loops are found by calling the product's own functions on empty arrays, so there is not a second list of
types. A test that has to compile a loop fails.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from axon_ps import kernels
from axon_ps.errors import InvalidRequest
from axon_ps.host import loop_cache
from axon_ps.types import WIRE_DTYPES, DType, Hyper

if TYPE_CHECKING:
    from axon_ps.optim.base import UpdateRule

COMMAND: Final = (sys.executable, "-P", "-m", "axon_ps.shard.loops")
LIMIT_S: Final = 900.0
"""Most seconds that other processes wait for it on a busy machine. Then they go on, and compile the loops they call."""
NOTICE: Final = "compiling loops for this machine, once: about 120 s of one core"
_HALVES: Final = (DType.BF16, DType.F16)
_MAX_PROCESSES: Final = 8
"""With more processes, the time would be that of the slowest loop alone."""


def compile_missing(notify: Callable[[str], None]) -> None:
    """Compile all loops, or return within milliseconds if they are recorded as compiled.

    Any number of processes may do so at once. After an error or `LIMIT_S`, loops are compiled when they are called.

    Args:
        notify: called with a line before it begins.
    """
    if loop_cache.is_complete():
        return
    from axon_ps.host.children import Child

    notify(NOTICE)
    child = Child.start("compiler", COMMAND, loop_cache.compiler_environment(), last_signal=signal.SIGKILL)
    try:
        child.wait(LIMIT_S)
    finally:
        child.end()


def compilations() -> list[Callable[[], None]]:
    """Return functions that together compile all loops, in any order, each in any process. The slowest come first."""
    from axon_ps.compress import cast, int8_block, registry
    from axon_ps.kernels import digest, stream_copy
    from axon_ps.optim import registry as optimizers
    from axon_ps.shard.client import transfers
    from axon_ps.shard.core import queued

    byte = np.zeros(1, np.uint8)
    rules = [optimizers.create(name) for name in dict.fromkeys(("rmsprop", "adam", *optimizers.names()))]
    return [
        *(registry.compressor(name).warm_up for name in dict.fromkeys(("int4", *registry.names()))),
        *(partial(warm_up, dtype) for dtype in WIRE_DTYPES for warm_up in (cast.warm_up, queued.warm_up)),
        int8_block.warm_up,
        *(partial(_compile_optimizer, rule, wire_dtype) for rule in rules for wire_dtype in (None, *_HALVES)),
        partial(queued.warm_up, DType.U8),
        transfers.warm_up,
        digest.warm_up,
        partial(stream_copy.copy, byte, byte.copy()),
    ]


def main() -> None:
    """Compile everything, in a process per core up to `_MAX_PROCESSES`, and record that it is done."""
    from axon_ps.kernels.compiled import locked, sources_hash

    directory = loop_cache.folder()
    if directory is None:
        return
    with locked(directory / f"{loop_cache.record_name()}.lock"):  # a process that waits finds everything compiled
        if loop_cache.is_complete():
            return
        processes = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        numbers = range(len(compilations()))  # imported here, once for all of them
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=fork) as pool:
            list(pool.map(_compile, numbers))
        loop_cache.record(directory, sources_hash(Path(kernels.__file__).parent))


def _compile(number: int) -> None:
    compilations()[number]()


def _compile_optimizer(rule: UpdateRule, wire_dtype: DType | None) -> None:
    """Compile an optimizer's loop for every choice of its options, with digests and without, as NO_SHARD calls it."""
    empty, wire = np.empty(0, np.float32), None if wire_dtype is None else np.empty(0, wire_dtype.numpy)
    for hyper in _choices(rule):
        rule.warm_up([hyper], wire_dtype)
        state = tuple(empty for _ in rule.state_names([hyper]))
        rule.apply(empty, empty, state, wire, wire_dtype or DType.F32, hyper, 1, 1.0)


def _choices(rule: UpdateRule) -> Iterator[Hyper]:
    """Yield hyperparameters for all choices of the options that are off by default, since each needs its own loop."""
    options = [name for name, default in rule.defaults.items() if default == 0.0]
    for chosen in itertools.product((0.0, 1.0), repeat=len(options)):
        with contextlib.suppress(InvalidRequest):  # options that exclude each other
            yield rule.validate(dict(zip(options, chosen, strict=True)))


if __name__ == "__main__":
    main()
