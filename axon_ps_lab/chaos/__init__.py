"""Chaos in the box: a seeded campaign of faults against a job, and a report of what came of each.

- `campaign`, `plan`, `figures`, pure: what is to happen, in which order, and what the observed events amount to.
- `report`, `page`, pure: that as JSON, and as a page with a timeline.
- `run`, `runner`: a whole campaign; its faults, one after the other.
- `embedded`, `training`, `disks`: a job of this machine that can be struck in every way, and compared bit by bit.
- `outside`: a job that runs already, whose processes on this host are struck.
- `observer`, `memory`, `checkpoints`, for both: the coordinator's feed, resident bytes, a checkpoint that is cut.
"""

from axon_ps_lab.chaos.campaign import Campaign, load

__all__ = ["Campaign", "load"]
