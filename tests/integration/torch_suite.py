"""PyTorch's own collective tests (`torch.testing._internal.distributed.distributed_test`) over the backend "axon".

PyTorch starts new processes for every test; here four processes run all of them, one after the other, and make the
process group anew when a test has failed. What PyTorch runs for gloo or MPI on CPU is run; what needs GPUs, NCCL or
UCC is skipped by PyTorch itself, which says why.

    python tests/integration/torch_suite.py [part of a name ...]      run it, print what came of every test
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_ps.testing import LocalCluster

WORLD_SIZE = 4
OPERATION_TIMEOUT_S = 20.0
TEST_TIMEOUT_S = 60.0

NOT_APPLICABLE = {
    "test_barrier_timeout_full_group": "expects gloo's words for a barrier that nobody came to",
    "test_barrier_timeout_group": "expects gloo's words for a barrier that nobody came to",
    "test_monitored_barrier": "dist.monitored_barrier refuses every backend but gloo, whose messages it expects",
}
"""What a backend of another name cannot give, by the beginning of the test's name: why."""

Outcome = tuple[str, str]


class _LikeGloo(str):
    """The backend's name; tests that ask whether it is gloo are told yes, and do what they do on CPU."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


_UNSKIPPED = re.compile("Only MPI supports")


def load() -> type[Any]:
    """PyTorch's tests as a class, nothing skipped that gloo or MPI would run on CPU."""
    os.environ["AXON_PS_ALLOW_PICKLE"] = "1"  # its objects are of classes of its own
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_distributed as decorators

        decorators.skip_if_small_worldsize = lambda test: test  # it wants 8 processes; its tests need 3
        import torch.testing._internal.distributed.distributed_test as theirs
    os.environ["BACKEND"] = "axon"
    theirs.BACKEND = _LikeGloo("axon")

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self, *_: object, **__: object) -> None:
            theirs.dist.barrier()

    return Tests


def names_of(tests: type[Any], chosen: Sequence[str]) -> list[str]:
    """The tests whose names contain one of `chosen`, or all, in PyTorch's order."""
    names = unittest.defaultTestLoader.getTestCaseNames(tests)
    return [name for name in names if not chosen or any(part in name for part in chosen)]


def run_one(tests: type[Any], name: str, rank: int) -> Outcome:
    """What came of one test on this rank: "passed", "failed", or "skipped" and the reason."""
    method = getattr(tests, name)
    why = getattr(method, "__unittest_skip_why__", "")
    for beginning, reason in NOT_APPLICABLE.items():
        if name.startswith(beginning):
            return "not applicable", reason
    if getattr(method, "__unittest_skip__", False) and not _UNSKIPPED.match(why):
        return "skipped", why
    from torch.testing._internal.common_utils import set_rng_seed

    test = tests(name)
    test.rank, test.file_name = rank, os.path.join(os.environ["TEMP_DIR"], name)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            set_rng_seed(1234)
            getattr(test, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code]
        return ("skipped", reasons[0]) if reasons else ("failed", f"exit code {end.code}")
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""


def run(chosen: Sequence[str], directory: str) -> dict[str, tuple[Outcome, float]]:
    """Run them on this rank, together with the other ranks; by test, what came of it and the seconds it took."""
    import torch.distributed as dist

    import axon_ps.parallel
    from axon_ps.parallel.c10d.store import KVStore

    os.environ["TEMP_DIR"] = directory
    for name in ("barrier", "test_dir", "init_dir"):
        Path(directory, name).mkdir(exist_ok=True)
    tests = load()
    outcomes: dict[str, tuple[Outcome, float]] = {}
    rank = int(os.environ["RANK"])
    timeout = datetime.timedelta(seconds=OPERATION_TIMEOUT_S)

    def begin() -> None:
        dist.init_process_group("axon", init_method="axon://", timeout=timeout)

    begin()
    for name in names_of(tests, chosen):
        begun = time.perf_counter()
        outcome = run_one(tests, name, rank)
        if outcome[0] in ("skipped", "not applicable"):
            outcomes[name] = outcome, 0.0
            continue
        # Every rank learns whether the test has failed on another one, through the store, which no test breaks.
        world = axon_ps.World.current()
        assert world is not None
        store = KVStore(world, f"suite/{name}", TEST_TIMEOUT_S)
        store.set(str(rank), outcome[0])
        everywhere = [store.get(str(r)) for r in range(WORLD_SIZE)]
        if outcome[0] == "passed" and b"failed" in everywhere:
            outcome = "failed", "on another rank"
        outcomes[name] = outcome, time.perf_counter() - begun
        if outcome[0] == "failed" or not dist.is_initialized():
            print(f"{name}: {outcome[1]}", file=sys.stderr, flush=True)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            begin()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return outcomes


def run_everywhere(chosen: Sequence[str] = (), timeout_s: float = 600.0) -> dict[str, tuple[Outcome, float]]:
    """Run them in `WORLD_SIZE` processes; by test, the worst outcome of any rank, and the seconds it took."""
    with LocalCluster(shards=1, world_size=WORLD_SIZE) as cluster, tempfile.TemporaryDirectory() as directory:
        results = cluster.run_workers(run, args=(list(chosen), directory), timeout_s=timeout_s)
    merged = results[0].value
    for result in results[1:]:
        for name, (outcome, _) in result.value.items():
            if outcome[0] == "failed" and merged[name][0][1] in ("", "on another rank"):
                merged[name] = outcome, merged[name][1]
    return merged  # type: ignore[no-any-return]


def main() -> int:
    outcomes = run_everywhere(sys.argv[1:])
    for name, ((kind, why), took_s) in outcomes.items():
        print(f"{kind:15s} {took_s:6.2f} s  {name}" + (f"\n{why}" if kind == "failed" else f"  ({why})" if why else ""))
    counts = collections.Counter(kind for (kind, _), _ in outcomes.values())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
