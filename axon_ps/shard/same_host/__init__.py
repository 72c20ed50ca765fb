"""Workers and shard servers of one host pass each other shared memory: no chunk goes through a socket there."""
