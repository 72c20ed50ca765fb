"""This machine and this process, without anything of jobs.

fork            the restrictions of a fork of a worker
children · tether   child processes that end with this one
shared_memory · shared_arrays · futex   memory that processes share, arrays in it, and waiting for a change in it
peer_socket · host_peer · leases   the identity of another process, passing it shared memory, permission to read that
peer_process    detecting that another process has ended
malloc          retaining the memory of messages for the next messages
"""
