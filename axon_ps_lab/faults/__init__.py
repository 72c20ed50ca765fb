"""Fault injection: kill, freeze, or disturb the connections of a running cluster at an exact moment.

`FaultyCluster` is a `LocalCluster` in which each connection goes through a `TcpProxy`. The test arms moments of a step
(`observe.moments`), at which processes then stop. `fault` names the faults, and `driver` injects them.
"""

import warnings
from typing import Any

from axon_ps.observe.moments import Moment
from axon_ps_lab.faults.cluster import FaultyCluster
from axon_ps_lab.faults.injector import ArmedMoments, Hit
from axon_ps_lab.faults.proxy import Proxies, TcpProxy

__all__ = ["ArmedMoments", "FaultyCluster", "Hit", "Moment", "Proxies", "TcpProxy"]


def __getattr__(name: str) -> Any:
    """Give `ArmedMoments` by its old name, for one release."""
    if name != "Moments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("axon_ps_lab.faults.Moments is called ArmedMoments now", DeprecationWarning, stacklevel=2)
    return ArmedMoments
