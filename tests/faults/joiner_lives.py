"""What the tests of joiners run: the main example, in lives that end by SIGKILL at a given moment."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30

MOMENTS = {
    "init": ("axon_ps.World", "init", 1),
    "construction": ("axon_ps.parallel.fsdp.materialize", "register", 1),
    "upload": ("axon_ps.parallel.fsdp.materialize", "upload", 1),
    "registered": ("axon_ps.parallel.fsdp.build", "server_runtime", 1),
    "optimizer": ("train_gpt", "make_optimizer", 1),
    "first forward": ("gpt.Block", "forward", 1),
    "forward": ("gpt.Block", "forward", 6),
    "backward": ("axon_ps.parallel.fsdp.runtime.Runtime", "grad_ready", 9),
    "vote": ("axon_ps.worker.steps.client.StepClient", "vote", 2),
    "between steps": ("gpt.Block", "forward", 5),
    "agreement": ("axon_ps.World", "agree", 2),
    "validation": ("train_gpt", "part_loss", 1),
    "checkpoint": ("train_gpt", "save", 1),
    "finish": ("train_gpt", "finish_now", 1),
    "export": ("train_gpt", "export_model", 1),
}
"""Where a life ends: an attribute of a module or class, and the call of it before which it does."""


def live(moment: str, out: str) -> tuple[float, str]:
    """Train until a moment, or to the end: the validation loss and a hash of all parameters."""
    sys.path.insert(0, str(EXAMPLES))
    import train_gpt

    def finish_last(world: Any, *rest: Any) -> None:
        """Rank 0 comes here when rank 1 only waits for it: else that might finish the job in its place, and leave."""
        if world.rank == 0:
            world.kv_wait("trained/1")
        train_gpt.finish_now(world, *rest)

    train_gpt.finish_now, train_gpt.finish = train_gpt.finish, finish_last
    if moment:
        owner, name, count = MOMENTS[moment]
        end_at(resolved(owner), name, count)
    digests: list[str] = []
    train = train_gpt.train

    def trained(world: Any, model: Any, *rest: Any) -> Any:
        curve = train(world, model, *rest)
        assert world.version == STEPS
        state = model.state_dict()
        digests.append(hashlib.sha256(b"".join(state[k].numpy().tobytes() for k in sorted(state))).hexdigest())
        world.kv_put(f"trained/{world.rank}", b"yes")
        return curve

    train_gpt.train = trained
    size = ["--layers", "1", "--channels", "16", "--heads", "2", "--context", "16", "--batch", "2"]
    size += ["--eval-windows", "16", "--sample-bytes", "4", "--compute", "float32", "--checkpoint-every", "8"]
    size += ["--time-budget-s", "150"]  # so that workers agree on the number of steps, which is a moment
    return train_gpt.main([*size, "--steps", str(STEPS), "--out", out]), digests[0]


def resolved(path: str) -> Any:
    """The module or class of this name."""
    import importlib

    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(importlib.import_module(module), name)


def end_at(owner: Any, name: str, count: int) -> None:
    """Kill this process when `owner.name` is called for the `count`. time."""
    plain, calls = owner.__dict__[name], 0
    call: Callable[..., Any] = plain.__func__ if isinstance(plain, classmethod) else plain

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, classmethod(counted) if isinstance(plain, classmethod) else counted)
