"""axon_ps on a Ray cluster: its coordinator, shard servers and workers as Ray actors. It needs the extra `ray`.

- `RayCluster` starts a job's services, spread over Ray's nodes, and workers beside them.
- `AxonConfig` is a backend of Ray Train: a plain `TorchTrainer` over the process group "axon".
- `AxonTrainer` is that trainer with parameters on the servers: a worker that dies is replaced while the others train.

Owns: the choice of a Ray node for each process, and its restart there or elsewhere. Refuses: to import Ray before it is
used. All of Ray's API is used in this package alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axon_ps.ray.config import ClusterConfig

if TYPE_CHECKING:
    from axon_ps.ray.cluster import RayCluster
    from axon_ps.ray.train import AxonConfig, AxonTrainer

_MODULES = {"RayCluster": "cluster", "AxonConfig": "train", "AxonTrainer": "train"}

__all__ = ["AxonConfig", "AxonTrainer", "ClusterConfig", "RayCluster"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(
            f"axon_ps.ray.{name} needs Ray, which is not installed: pip install 'axon-ps[ray]'", name="ray"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
