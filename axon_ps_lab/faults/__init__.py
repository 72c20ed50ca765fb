"""Fault injection: kill, freeze, or disturb the connections of a running cluster at an exact moment.

`FaultyCluster` is a `LocalCluster` in which each connection goes through a `TcpProxy`. The test arms moments of a step
(`observe.moments`), at which processes then stop.
"""

from axon_ps.observe.moments import Moment
from axon_ps_lab.faults.cluster import FaultyCluster
from axon_ps_lab.faults.injector import Hit, Moments
from axon_ps_lab.faults.proxy import Proxies, TcpProxy

__all__ = ["FaultyCluster", "Hit", "Moment", "Moments", "Proxies", "TcpProxy"]
