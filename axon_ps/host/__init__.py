"""What belongs to this machine and this process, and knows nothing of jobs.

fork        which process may use what a worker has opened, when the worker forks
"""
