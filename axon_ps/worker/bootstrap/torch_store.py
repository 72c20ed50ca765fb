"""torch's own store, for workers to find each other: torchrun's agent serves it, or the worker of rank 0 does.

torch is loaded only when it is needed. It must be installed if `MASTER_ADDR` names its store.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from axon_ps.errors import ConfigurationError, Unreachable
from axon_ps.observe.reminders import reminding
from axon_ps.worker.environment import LaunchInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = logging.getLogger(__name__)


def torch_store(address: str, launch: LaunchInfo, prefix: str, timeout_s: float) -> Store:
    """Connect to torch's store, or serve it, exactly as `init_process_group` does. The two can share it.

    Args:
        address: "host:port".
        launch: this worker's rank and launcher.
        prefix: of our keys.
        timeout_s: most seconds for connecting; on a rank 0 that serves, until all others are connected.

    Raises:
        ConfigurationError: torch is not installed.
        Unreachable: there is no server at the address, or workers are missing.
    """
    try:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise ConfigurationError(
            f"MASTER_ADDR and MASTER_PORT name torch's store at {address}, and torch is not installed: install "
            "axon-ps[torch], or set AXON_PS_COORDINATOR=host:port to join a job that runs"
        ) from error
    url = f"tcp://{address}?rank={launch.rank}&world_size={launch.world_size}"
    what = f"rank {launch.rank} of {launch.world_size} is waiting for torch's store at {address} and the others there"
    try:
        with reminding(_logger, lambda: what):
            store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Unreachable(
            f"torch's store at {address} (MASTER_ADDR, MASTER_PORT), where the workers of this job meet, cannot be "
            f"used: {reason}"
        ) from None
    return PrefixStore(prefix, store)
