"""Campaigns of `make lab`, which are run by hand; a sample of most of them is a test of `tests/faults`.

- `grid`, `case`, `grid_run`: victims, faults, moments and promises; one combination; all combinations.
- `soak`: 2,000 random faults on one job.
- `exact_model`: the model that grid and soak train, whose numbers are never rounded, and its oracle.
- `all_killed`: all processes of a job at once.
- `failover`, `failover_job`: faults of the leading coordinator, and of etcd.
- `flips`, `ended_job`: bits of servers' memory that change while a job trains.
- `loaders`, `shm_kills`, `big_starts`: data loaders, ranks that share memory, and starts of large jobs.
- `group_soak`: thousands of calls of overlapping groups.

Chaos, which users run too, is `axon_ps_lab.chaos`.
"""
