"""`FullyShardedDataParallel`: a module whose parameters are on the shard servers.

fsdp         the wrapper                                    build      the parts of a wrapped model, by strategy
runtime      the order of events: gather, reshard, push     abstract_runtime   the methods that make steps
gathering    the units in memory, and their order           forwards   in one thread at a time, of one version
flat_unit    one unit's parameters, their memory and state  sources    the ways in which its values come
hooks · memory   the calls to the runtime, and buffers      materialize   first values
masters · values   parameters: read, replaced, saved
strategy · wrap · stats   the sharding strategies, the division of a model into units, its memory
steps        the interface that makes steps: the worker's step client, or
on_servers   its parts for steps on the shard servers
hybrid       a node's workers together                      no_shard   every worker keeps everything
arguments    of the wrapper, checked                        tensors      parameters and gradients in the user's hands
"""
