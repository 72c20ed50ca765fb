"""What a shard server holds and decides, as a deterministic state machine: no threads, sockets or clocks."""
