"""Averaging of a bucket of gradients over the ranks: as it is, or compressed."""
