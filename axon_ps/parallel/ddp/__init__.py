"""Every rank has the whole module, and gradients are averaged: `DistributedDataParallel`, and by hand."""
