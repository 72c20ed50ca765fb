"""The shard server: owns slices of parameters and optimizer state.

engine     what is held and decided, sans-IO · slices (arrays and counters of one slice) · segments (parameter groups)
           · updater (the optimizer)
shell      one server's models, and what they share · model_shell (waits, threads and reports around one engine)
           · waiters · apply (threads, and snapshots and copies past them) · snapshot (slices in checkpoints)
servicer   the protocol        server   one server as a process runs it
client     a worker's end · peers (who owns what, connections) · transfers (with one server)
reach      who of one host can read whose memory · shared_copy (parameters that workers map) · shared_buffers (gradients
           that servers map) · mappings (a segment's address as a message)
collectives  of the workers, sans-IO · meetings (agreement) · seats · flows · mailbox · pieces (how data is spread);
           collective_shell and collective_servicer around them; collective_client, a worker's end · operation_stream
           · shares_in_step (how far uploads may run ahead)
memory     malloc keeps message buffers
"""
