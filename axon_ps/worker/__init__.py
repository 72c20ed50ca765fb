"""A worker of a job, without PyTorch: its world, the groups in it, and its half of the training steps.

world         joining, leaving, groups, barriers, values        steps         gather, push, vote, learn the decision
job_view      what it knows of the members · models
environment   which rank it is, and where the coordinator is    bootstrap     a job formed by its workers
worker        a worker that is a process · mock_job            a thread as a worker, and its job in this process
"""
