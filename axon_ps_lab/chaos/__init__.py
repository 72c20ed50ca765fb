"""Campaigns of faults against a job, from a seed, and reports of the effect of each fault.

- `campaign`, `plan`, `figures`, pure: the settings, the order of the faults, and figures of the observed events.
- `report`, `page`, pure: the figures as JSON, and as a page with a timeline.
- `run`, `runner`: a whole campaign; its faults, one after the other.
- `embedded`, `training`, `disks`: a job of this machine that all faults can strike, and that is compared bit by bit.
- `strikes`, `worker_notes`: its faults, and the commits that its workers have written down.
- `outside`: a job that runs already, whose processes on this host are struck.
- `observer`, `memory`, `checkpoints`, for both: the coordinator's feed, resident bytes, a truncated checkpoint.
"""

from axon_ps_lab.chaos.campaign import Campaign, load

__all__ = ["Campaign", "load"]
