"""Chaos in the box: a seeded campaign of faults against a job, and a report of what came of each.

campaign · plan · figures     pure: what is to happen, in which order, and what the observed events amount to
embedded · training · disks   a job of this machine that can be struck in every way, and compared bit by bit
outside                       a job that runs already: its processes on this host are struck, and its feed is read
observer                      follows the coordinator's feed
runner · page                 the campaign itself; its report as JSON and as a page
"""

from axon_ps.testing.chaos.campaign import Campaign, load

__all__ = ["Campaign", "load"]
