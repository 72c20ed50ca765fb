"""The parts of axon_ps that are fuzzed: decoders, services, their sockets, the half of a worker, checkpoints."""
