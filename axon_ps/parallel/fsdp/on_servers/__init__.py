"""Parts of `ServerRuntime`: the values, the optimizer and the speculative gathers of a model on the shard servers."""
