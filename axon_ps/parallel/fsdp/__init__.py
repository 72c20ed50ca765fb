"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

fsdp         the wrapper                                    build      the parts of a wrapped model, by strategy
runtime      the order of events: gather, reshard, push     server_runtime   push, vote, decision; the end of a step
abstract_runtime   the methods that make steps              one_thread   a second thread is refused
flat_unit    one unit's parameters, their memory and state  sources    the ways in which its values come
hooks · order · memory   the calls to the runtime, the order of units, and buffers
values       parameters: read, replaced, saved              materialize   first values
strategy · wrap · stats   the sharding strategies, the division of a model into units, its memory
steps        the interface that makes steps: the worker's step client, or
hybrid       a node's workers together                      no_shard   every worker keeps everything
arguments    of the wrapper, checked                        tensors      parameters and gradients in the user's hands
"""
