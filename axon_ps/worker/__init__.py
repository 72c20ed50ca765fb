"""A worker of a job, without PyTorch: its world, the groups in it, and its half of the training steps.

world         joining, leaving, groups, barriers, values        steps         gather, push, vote, learn the decision
job_view      its knowledge of the members                      models        its knowledge of the models
environment   its rank, and the coordinator's address           bootstrap     a job formed by its workers
worker        a worker that is a process                        mock_job      threads as workers, and their job
"""
