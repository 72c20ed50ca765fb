"""This machine and this process; knows nothing of jobs.

fork            what a fork of a worker may not use
children · tether   child processes that end with us
shared_memory · shared_arrays · futex   memory that processes share, arrays in it, and waiting for a change in it
peer_socket · host_peer · leases   who another process is, passing it shared memory, and permission to read that
peer_process    whether another process lives
malloc          retaining the memory of messages for the next messages
"""
