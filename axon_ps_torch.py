"""The part of axon_ps that PyTorch loads by itself, through the entry points in pyproject.toml: only names.

`import torch` calls `autoload`, so `init_process_group("axon")` works in a program that never imports axon_ps;
torchrun calls `rendezvous_creator`, so it knows `--rdzv-backend=axon`. axon_ps itself is imported when a process group
is made, or a rendezvous.

It is not in the package `axon_ps`, on purpose: importing a module of a package imports the package, and every program
that imports torch on this machine would do so. Invariants: this imports nothing but the standard library and modules
that `import torch` has loaded already; `autoload` raises nothing, since torch could not be imported then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

BACKEND = "axon"


def autoload() -> None:
    """Register with torch.distributed; errors are logged. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off."""
    try:
        register()
    except Exception as error:
        logging.getLogger(__name__).warning(
            "the backend %r is not known to torch.distributed until axon_ps.parallel is imported: %r", BACKEND, error
        )


def register() -> None:
    """Register the backend "axon" and the rendezvous `axon://` with torch.distributed; harmless when repeated."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # From 2.15 on torch attaches a flight recorder of its own to every group whose backend has none. It would ask a
    # backend of C++'s, and see nothing: operations of ours do not pass through torch's dispatcher. We record our own.
    self_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    self_recording.add(BACKEND)
    register_rendezvous_handler(BACKEND, _rendezvous)  # type: ignore[no-untyped-call]


def _create(options: Any, backend_options: object) -> Any:
    """Create the backend; torch calls this on every member of a group."""
    from axon_ps.parallel.c10d.register import create

    return create(options, backend_options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from axon_ps.parallel.c10d.register import rendezvous

    return rendezvous(url, **options)


def rendezvous_creator() -> Callable[[Any], Any]:
    """Return the function that makes the handler of `torchrun --rdzv-backend=axon`."""
    return _rendezvous_handler


def _rendezvous_handler(parameters: Any) -> Any:
    from axon_ps.parallel.torchrun.handler import create

    return create(parameters)
