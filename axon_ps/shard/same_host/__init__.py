"""Shared memory between the workers and shard servers of one host, so that large chunks do not go through a socket."""
