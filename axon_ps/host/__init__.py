"""What belongs to this machine and this process, and knows nothing of jobs.

fork            which process may use what a worker has opened, when the worker forks
children · tether   programs of ours as children that die with us
shared_memory · futex   memory that processes share, and waiting for words in it
process_memory · leases · peer_process   reading another process's memory, and whether it lives
malloc          how this process keeps the memory of messages
"""
