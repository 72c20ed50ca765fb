"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

fsdp         the wrapper                                    build      what it is made of, by strategy
runtime      what happens when: gather, reshard, push       server_runtime   push, vote, decision; the end of a step
abstract_runtime   how steps are made                       one_thread   a second thread is refused
flat_unit    one unit's parameters, their memory and state  sources    the ways in which its values come
hooks · order · memory   what drives the runtime, and its buffers
values       parameters: read, replaced, saved              materialize   first values
strategy · wrap · stats   which parameters stay where, how a model is wrapped and divided, its memory
steps        what is asked of whoever makes steps: the worker's step client, or
hybrid       a node's workers together                      no_shard   every worker keeps everything
arguments    of the wrapper, checked                        tensors      parameters and gradients in the user's hands
"""
