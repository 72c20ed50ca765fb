"""One process of `library_runs.run`: calls the `main` of a script several times, each as if it were a program."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The process group is made by the first of the calls, and is that of the others, too."""
    return lambda *args, **kwargs: None if torch.distributed.is_initialized() else function(*args, **kwargs)


def main() -> None:
    """Make all calls."""
    plan = json.loads(sys.argv[1])
    sys.path.insert(0, plan["path"])
    torch.distributed.init_process_group = once(torch.distributed.init_process_group)
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *args: None
    spec = importlib.util.spec_from_file_location("script", plan["script"])
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["script"] = script
    spec.loader.exec_module(script)
    for arguments in plan["runs"]:
        script.main(arguments)
        if (state := sys.modules.get("accelerate.state")) is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()
    torch.distributed.barrier()
    destroy()


if __name__ == "__main__":
    main()
