"""A replica of the module on every rank: gradients are averaged by `DistributedDataParallel`, or by hand."""
