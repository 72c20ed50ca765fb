"""The state and the decisions of a shard server, as a deterministic state machine: no threads, sockets or clocks."""
