"""A worker's end of the shard servers: gather units, push gradients, upload first values."""
