"""`FullyShardedDataParallel`: a module whose parameters live on the shard servers.

fsdp         the wrapper                                runtime    what happens when: gather, free, push, step
flat_unit    one unit's parameters and their memory     hooks · order · memory   what drives it, and its buffers
values       whole parameters: shown, replaced, saved   materialize   first values
strategy · wrap · stats   what is kept where, how a model is cut, what that costs
steps        what the runtime asks of whoever makes steps: the worker's step client, or
hybrid       a node's workers together                  no_shard   every worker keeps everything
sharded_parameter · sent_gradients · torch_functions   what torch's functions meet in the user's hands
"""
