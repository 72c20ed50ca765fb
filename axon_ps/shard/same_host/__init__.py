"""Shared memory between the workers and shard servers of one host, so that no chunk goes through a socket."""
