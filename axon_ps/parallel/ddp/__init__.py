"""Every rank has a replica of the module, and gradients are averaged: `DistributedDataParallel`, and by hand."""
