"""The shard server: owns slices of parameters and optimizer state.

engine     what is held and decided, sans-IO · slices (arrays and counters of one slice) · segments (parameter groups)
           · updater (the optimizer)
shell      waits, threads and reports around the engine · waiters · apply (threads, and snapshots past them)
           · snapshot (slices in checkpoints)
servicer   the protocol        server   one server as a process runs it
client     a worker's end · peers (who owns what, connections) · transfers (one stream with one server)
memory     malloc keeps message buffers
"""
