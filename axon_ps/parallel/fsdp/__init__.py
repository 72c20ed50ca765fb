"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

fsdp         the wrapper                                runtime    what happens when: gather, reshard, push, step
flat_unit    one unit's parameters and their memory     hooks · order · memory   what drives it, and its buffers
values       parameters: read, replaced, saved   materialize   first values
strategy · wrap · stats   which parameters stay where, how a model is divided, its memory
steps        what the runtime asks of whoever makes steps: the worker's step client, or
hybrid       a node's workers together                  no_shard   every worker keeps everything
sharded_parameter · sent_gradients · torch_functions   what torch's functions meet in the user's hands
"""
