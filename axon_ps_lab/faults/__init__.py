"""Fault injection: kill, freeze, or disturb the connections of a running cluster at an exact moment.

`FaultyCluster` is a `LocalCluster` whose connections go through a `TcpProxy` each, and whose processes stop at a moment
of a step (`observe.moments`) that the test has armed.
"""

from axon_ps.observe.moments import Moment
from axon_ps_lab.faults.cluster import FaultyCluster
from axon_ps_lab.faults.injector import Hit, Moments
from axon_ps_lab.faults.proxy import Proxies, TcpProxy

__all__ = ["FaultyCluster", "Hit", "Moment", "Moments", "Proxies", "TcpProxy"]
