"""What concerns this machine and this process, and knows nothing of jobs.

fork            what a fork of a worker may not use
children · tether   child processes that end with us
shared_memory · shared_arrays · futex   memory that processes share, arrays in it, and waiting for a change in it
process_memory · leases · peer_process   the handshake, reading another process's memory, and whether it lives
malloc          retaining the memory of messages for the next messages
"""
